"""What Dynamo remembers, forgotten: as in a cell's own process, for tests that run a probe in theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def forget() -> None:
    """Drop compiled code, counters, and the records of compilations and graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.graph_break_reasons.clear()


@pytest.fixture
def clean_dynamo() -> Iterator[None]:
    """Nothing was compiled before, and one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    yield
    forget()
    torch.set_num_threads(before)
