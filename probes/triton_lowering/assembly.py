"""What a compiled kernel is made of, read from its IR, its PTX and the assembler's words. Pure text.

Counts are static: instructions in the program, not executions. PTX's matrix instructions are `mma.sync` (Volta to
Ada), `wgmma` (Hopper) and `tcgen05` (Blackwell); where a `tl.dot` left none of them it is scalar arithmetic.
"""

from __future__ import annotations

import re

import msgspec

_MATRIX = re.compile(r"^\s*(?:@%\w+\s+)?((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.]*)", re.M)
_FMA = re.compile(r"^\s*(?:@%\w+\s+)?fma\.rn[\w.]*", re.M)
_BF16 = re.compile(r"^\s*(?:@%\w+\s+)?([a-z][\w.]*\.bf16[\w.]*)", re.M)
_DOT = re.compile(r"\btt\.dot\b[^\n]*?: tensor<(?:\d+x)+(\w+)>")
# Shared memory one block can have (opt-in), bytes: CUDA C++ Programming Guide, technical specifications.
SHARED_LIMIT_BYTES = {70: 98_304, 75: 65_536, 80: 166_912, 90: 232_448}
# Operand types for which the target has a matrix instruction; Triton computes fp32 dots in tf32 where it can.
MATRIX_TYPES = {
    70: ("f16",),
    75: ("f16", "i8"),
    80: ("f16", "bf16", "f32", "i8", "f64"),
    90: ("f16", "bf16", "f32", "i8", "f64"),
}
# Lines in which a compiler says what is wrong; the groups are what is kept of them.
_COMPLAINTS = (
    re.compile(r"(LLVM ERROR:.*)"),
    re.compile(r"(Unsupported .*)"),
    re.compile(r"(ptxas) .*?;\s*(?:error|fatal)\s*:\s*(.*)"),
    re.compile(r"\S+: (?:\S*/)?([\w.]+\.(?:cpp|h):\d+:).*?(Assertion .* failed)"),
    re.compile(r"(?:\S+:\d+:\d+: )?(error: .*)"),
)


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel's instructions."""

    dots: int  # tl.dot in the source
    operands: tuple[str, ...]  # of the dots, each type once
    matrix: dict[str, int]  # matrix instruction, without types -> how many
    fma: int
    bf16: int
    lines: int


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What the assembler says it used, of one thread."""

    registers: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None


def made(ttir: str, ptx: str) -> Made:
    """Read the two texts."""
    operands = _DOT.findall(ttir)
    matrix: dict[str, int] = {}
    for word in _MATRIX.findall(ptx):
        short = _shape(word)
        matrix[short] = matrix.get(short, 0) + 1
    return Made(
        dots=len(re.findall(r"\btt\.dot\b", ttir)),
        operands=tuple(dict.fromkeys(operands)),
        matrix=matrix,
        fma=len(_FMA.findall(ptx)),
        bf16=len(_BF16.findall(ptx)),
        lines=ptx.count("\n"),
    )


def _shape(word: str) -> str:
    """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 -> mma.sync m16n8k16."""
    shape = re.search(r"\.(m\d+n\d+k\d+)", word)
    return " ".join(filter(None, [".".join(word.split(".")[:2]), shape[1] if shape else ""]))


def resources(log: str) -> Resources:
    """What `ptxas -v` printed."""
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Resources(
        registers=int(used[1]) if used else None,
        stack_bytes=int(spilled[1]) if spilled else None,
        spill_store_bytes=int(spilled[2]) if spilled else None,
        spill_load_bytes=int(spilled[3]) if spilled else None,
    )


def complaint(error: str, log: str) -> str:
    """The compiler's own words, on one line: its complaints in the log and the exception, then the exception's name."""
    said = [short for text in (log, error) for line in text.splitlines() if (short := _complaint(line))]
    first = error.splitlines()[0].rstrip(": ") if error else ""
    return "; ".join(dict.fromkeys([*said[:2], *([first] if first else [])]))[:1000]


def _complaint(line: str) -> str:
    """A line that says what is wrong, without the paths in it; empty for any other."""
    for pattern in _COMPLAINTS:
        if found := pattern.match(line):
            return " ".join(word.strip() for word in found.groups() if word)
    return ""


def dots_in_words(kernel: Made) -> str:
    """How the dots are computed: by which matrix instruction, or by scalar FMA; or that there is none."""
    if not kernel.dots:
        return "no dot"
    if kernel.matrix:
        named = ", ".join(f"{count:,} {name}" for name, count in kernel.matrix.items())
        return f"tensor cores: {named}"
    return f"scalar FMA: {kernel.fma:,} fma, no matrix instruction"
