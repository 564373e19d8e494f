"""Which heads each rank of a Ulysses group takes: any counts of query and key/value heads, any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Query heads in consecutive runs, as even as they go; with each run the key/value heads that it reads.

    A key/value head that several ranks read goes to each of them; its gradient is the sum over the copies.
    12 query heads, 2 key/value heads, 3 ranks: rank 1 takes query heads 4-7 and both key/value heads.
    """

    query: int
    kv: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise ValueError where the counts can't be dealt out."""
        if self.kv < 1 or self.query % self.kv:
            raise ValueError(f"{self.query} query heads are no multiple of {self.kv} key/value heads")
        if self.query < self.ranks:
            raise ValueError(
                f"Ulysses deals heads out: {self.query} query heads do not serve {self.ranks} ranks; "
                f"take at most {self.query}, and a ring for the rest"
            )

    def queries(self, rank: int) -> slice:
        """The query heads of a rank; the first ranks take one more where they do not divide."""
        each, more = divmod(self.query, self.ranks)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def keys(self, rank: int) -> slice:
        """The key/value heads that the rank's query heads read."""
        group, queries = self.query // self.kv, self.queries(rank)
        return slice(queries.start // group, (queries.stop - 1) // group + 1)

    def query_heads(self, rank: int) -> int:
        """How many query heads a rank takes."""
        return len(range(self.query)[self.queries(rank)])

    def kv_heads(self, rank: int) -> int:
        """How many key/value heads a rank takes."""
        return len(range(self.kv)[self.keys(rank)])

    def rows(self, rank: int) -> int:
        """Heads of q, k and v together that travel to a rank."""
        return self.query_heads(rank) + 2 * self.kv_heads(rank)

    def index(self, rank: int) -> list[int] | None:
        """For each query head of the rank its key/value head among the rank's; None where grouping says it already."""
        group, queries, keys = self.query // self.kv, self.queries(rank), self.keys(rank)
        index = [head // group - keys.start for head in range(queries.start, queries.stop)]
        each, rest = divmod(len(index), keys.stop - keys.start)
        regular = not rest and index == [i // each for i in range(len(index))]
        return None if regular else index
