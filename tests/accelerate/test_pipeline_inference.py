"""Inference through stages: of a small model on the ranks of a pool, of a Llama in programs of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_programs import run_program
from accelerate_sides import OURS

CASES = [("gathered", "4,3,1"), ("last", "5")]


class Stack(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return {"logits": self.head(hidden)}


def run_in_stages(gathers: bool, samples: list[int]) -> tuple[list[Any], list[Tensor], int, int]:
    """Return what this process has of each output, what the whole model returns, and the parameters of both."""
    with OURS.accelerator() as accelerator, torch.no_grad():
        torch.manual_seed(0)
        model = Stack().eval()
        batches = [torch.randint(64, (number, 5)) for number in samples]
        expected = [model(batch)["logits"] for batch in batches]
        whole = sum(each.numel() for each in model.parameters())
        divide = OURS("accelerate.inference.prepare_pippy")
        divided = divide(model, split_points=["layers.2"], example_args=(batches[0],), gather_output=gathers)
        # The first rank's inputs count.
        outputs = [divided(batch if accelerator.is_main_process else batch + 1 - batch) for batch in batches]
        found = [None if one is None else one["logits"] for one in outputs]
        return found, expected, sum(each.numel() for each in model.parameters()), whole


@pytest.mark.parametrize(("gathers", "samples"), [(True, [4, 3, 1]), (False, [5])])
def test_small_stages_return_what_the_whole_model_does(
    run_ranks: Any, gathers: bool, samples: list[int]
) -> None:
    (first, expected, own, whole), (last, _, others, _) = run_ranks(run_in_stages, gathers, samples)
    for found in [first, last] if gathers else [last]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert gathers or first == [None]
    assert max(own, others) < whole <= own + others


def test_one_process_holds_the_whole_model() -> None:
    found, expected, own, whole = run_in_stages(gathers=False, samples=[3])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert own == whole


@pytest.mark.slow
@pytest.mark.parametrize(("gathers", "samples"), CASES)
def test_a_model_in_stages_returns_what_the_whole_one_does(gathers: str, samples: str) -> None:
    pytest.importorskip("transformers")
    expected, num_parameters, every = run_program("with_pippy", gathers, samples, ours=True, num_processes=2)
    (first, own), (last, others) = every
    for found in [last, first] if gathers == "gathered" else [last]:
        for one, whole in zip(found, expected, strict=True):
            assert [pytest.approx(row, abs=1e-4) for row in one] == whole
    if gathers == "last":
        assert first == [None]
    assert max(own, others) < num_parameters <= own + others
