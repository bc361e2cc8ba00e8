"""Modules of torch that take another kernel where they may: dispatched, they take the same one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import streamed
from drivetrain_dispatch import disk_offload, dispatch_model

WIDTH = 64


class Attention(nn.Module):
    """To itself, as an image model pools its tokens, and to others; torch has a kernel for each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        others = x[:, :5] * 2
        return self.attention(x, x, x)[0] + self.attention(x, others, others)[0]


@pytest.mark.parametrize("way", ["streamed", "in place"])
@pytest.mark.parametrize(
    "build",
    [
        Attention,
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2),
    ],
)
def test_attention_gives_the_same_bits(build: type[nn.Module], way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(4, 16, WIDTH)
    plain = copy.deepcopy(model)
    streamed(model) if way == "streamed" else disk_offload(model, tmp_path)
    for _ in range(2):
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("write_back", [False, True])
def test_weights_of_odd_sizes_compute_the_same_bits_from_a_file(tmp_path: Path, write_back: bool) -> None:
    """As matrix times vector does otherwise in fp32, where a weight begins 8 bytes after a multiple of 16."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1021, 1021), nn.ReLU(), nn.Linear(1021, 517), nn.LayerNorm(517), nn.Linear(517, 1021)
    )
    model.append(nn.Unflatten(1, (1, 1021))).append(nn.Conv1d(1, 3, 5, bias=True)).eval()
    batches = [torch.randn(num, 1021) for num in (1, 2, 7)]
    expected = [model(batch) for batch in batches]
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, write_back=write_back)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in model.parameters())
    assert all(torch.equal(model(batch), one) for batch, one in zip(batches, expected, strict=True))
