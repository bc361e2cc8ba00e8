"""Modules of torch that take another kernel where they may: dispatched, they take the same one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import streamed
from drivetrain_dispatch import disk_offload

WIDTH = 64


class SelfAttention(nn.Module):
    """As an image model pools its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("way", ["streamed", "in place"])
@pytest.mark.parametrize(
    "build",
    [
        SelfAttention,
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2),
    ],
)
def test_attention_gives_the_same_bits(build: type[nn.Module], way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(4, 16, WIDTH)
    plain = copy.deepcopy(model)
    streamed(model) if way == "streamed" else disk_offload(model, tmp_path)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))
