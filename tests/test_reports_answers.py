"""An answer names a winner only where one is right, and ahead by more than noise."""

from __future__ import annotations

from harness.rows import AttentionReport, Parity, Row
from reports.answers import Answer, answers
from tests.test_reports_sample import WRONG, failed, row, run, sweep


def ask(*rows: Row) -> dict[str, Answer]:
    return {answer.question: answer for answer in answers([run(*rows)])}


def kernel(*rows: Row) -> Answer:
    return ask(*rows)["Which attention kernel?"]


def twice(tok_s: float, off: float = 0.0, **axes: object) -> tuple[Row, Row]:
    """Two processes of a cell, `off` apart."""
    return row(tok_s=tok_s, **axes), row(tok_s=tok_s * (1 + off), replicate=1, **axes)


def test_the_fastest_right_one_wins_and_the_runner_up_is_named() -> None:
    answer = kernel(*twice(3000), *twice(4500, attention="flash"), *twice(4000, attention="xformers"))
    assert answer.sentence == "flash: 4,500 tok/s, 9.00 GiB at seq 1,024; 1.12x the next, xformers."
    assert answer.reservations == ()
    assert str(answer).startswith("Which attention kernel? flash")


def test_no_winner_is_called_within_the_measured_spread() -> None:
    answer = kernel(*twice(3000, 0.04), *twice(3060, 0.04, attention="flash"))
    assert (
        answer.sentence
        == "flash and math: no difference that this run can tell apart at seq 1,024: 1.02x, spread 3.9 %."
    )


def test_single_processes_must_be_further_apart_and_say_so() -> None:
    assert (
        "too few processes for a difference below 5.0 %"
        in kernel(row(tok_s=3000), row(tok_s=3100, attention="flash")).sentence
    )
    answer = kernel(row(tok_s=3000), row(tok_s=3300, attention="flash"))
    assert answer.sentence.startswith("flash: ")
    assert "spread between processes is not known" in answer.reservations[0]


def test_all_that_are_tied_are_named() -> None:
    rows = (
        *twice(3000),
        *twice(3010, attention="flash"),
        *twice(3005, attention="xformers"),
        *twice(99, attention="cudnn"),
    )
    assert kernel(*rows).sentence.startswith("flash, xformers and math: no difference")


def test_a_wrong_result_never_wins_however_fast() -> None:
    answer = kernel(*twice(3000), *twice(9000, attention="flash", parity=WRONG))
    assert answer.sentence.startswith("math: the only one that ran right")
    assert "flash (wrong result, mismatch" in answer.evidence[0]


def test_a_kernel_that_was_not_honoured_never_wins() -> None:
    other = AttentionReport(asked="flash", ran="math", honoured=False)
    assert kernel(*twice(3000), *twice(9000, attention="flash", kernel=other)).sentence.startswith("math: ")


def test_an_unchecked_winner_carries_a_reservation() -> None:
    unknown = Parity(verdict="no_reference", reason="too large")
    answer = kernel(*twice(3000), *twice(9000, attention="flash", parity=unknown))
    assert "flash was not checked" in answer.reservations[0]


def test_what_is_doubtful_about_the_winner_is_said() -> None:
    answer = kernel(*twice(3000), *twice(9000, attention="flash", notes=("capped at 16 GiB",)))
    assert answer.reservations == ("flash: capped at 16 GiB",)


def test_another_winner_elsewhere_is_said() -> None:
    rows = (
        *twice(3000, seq=2048),
        *twice(4000, seq=2048, attention="flash"),
        *twice(3000),
        *twice(1000, attention="flash"),
    )
    answer = kernel(*rows)
    assert answer.sentence.startswith("flash: ")
    assert answer.reservations == ("in 1 setting of 2 another wins, e.g. math with seq 1,024",)


def test_what_rows_cannot_answer_says_which_run_would() -> None:
    said = ask(row(), row(seq=2048))
    assert "run a suite whose axes.dtype lists another dtype" in said["Which dtype?"].sentence
    assert "make quick" in ask()["Which dtype?"].sentence
    assert (
        "None ran right (math oom: x, flash oom: x)"
        in kernel(failed("oom", "x"), failed("oom", "x", attention="flash")).sentence
    )


def test_the_longest_sequence_and_how_the_next_failed() -> None:
    longest = ask(*sweep(("math",), ("none",)))["How long a sequence?"]
    assert longest.sentence.startswith(
        "4,096 tokens: 1,675 tok/s, 19.92 GiB; the next, 8,192: oom: CUDA out of"
    )
    assert "the longest that was tried" in ask(row())["How long a sequence?"].sentence
    none = ask(failed("oom", "no memory", seq=2048))["How long a sequence?"].sentence
    assert none == "None ran right; the shortest tried, 2,048, ended so: oom: no memory."


def test_each_device_has_its_own_answers() -> None:
    names = {"e1": {"device": {"name": "A"}}, "e2": {"device": {"names": ["B", "B"]}}}
    found = answers([run(row(), row(seq=2048, environment="e2"), environments=names)])
    assert [a.question for a in found if "long" in a.question] == [
        "How long a sequence (A)?",
        "How long a sequence (B)?",
    ]
