"""Real text as tokens, without a hub: the bytes of a public-domain text, ids 0 to 255."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TEXT = Path(__file__).with_name("jargon.txt")


def tokens(batch: int, seq: int, device: str) -> torch.Tensor:
    """Byte tokens [batch, seq], int64. Rows begin at different places; a text that is too short repeats."""
    import torch

    data = torch.frombuffer(bytearray(_TEXT.read_bytes()), dtype=torch.uint8)
    starts = torch.arange(batch) * (len(data) // max(batch, 1))
    index = (starts[:, None] + torch.arange(seq)) % len(data)
    return data[index].long().to(device)
