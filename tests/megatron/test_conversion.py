"""Models of transformers become Megatron's, with the same logits, and come back with the same bits."""

import pytest
import torch

from drivetrain_megatron import megatron_from_transformers
from drivetrain_megatron.divisions import find_cuts
from drivetrain_megatron.groups import check_axes, close_parallel_state, open_parallel_state
from drivetrain_megatron.shapes import shape_of
from drivetrain_megatron.weights import from_megatron, to_megatron
from drivetrain_state import ParallelDims
from megatron_models import KINDS, NUM_TOKENS, model_of, places, tokens
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


@pytest.mark.parametrize("kind", KINDS)
def test_weights_there_and_back_have_the_same_bits(kind: str) -> None:
    model = model_of(kind)
    shape = shape_of(model.config)
    before = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    there = to_megatron(before, shape.kind, shape.sizes)
    back = from_megatron(there, shape.kind, shape.sizes)
    is_tied = shape.sizes.is_tied
    assert back.keys() == before.keys() - ({"lm_head.weight"} if is_tied else set())
    for name, value in back.items():
        assert torch.equal(value, before[name]), name
    assert sum(v.numel() for v in there.values()) == sum(p.numel() for p in model.parameters())


def check(kinds: list[str], **sizes: int) -> None:
    with megatron_on_cpu(), context(parallelism=ParallelDims(**sizes)) as where:
        check_axes(where)
        open_parallel_state(where)
        rank, size = where.ranks("tensor").index, where.ranks("tensor").size
        for kind in kinds:
            source = model_of(kind).eval()
            model = megatron_from_transformers(source)
            ids = tokens()
            with torch.no_grad():
                expected = source(ids).logits
                found = model(ids, places(ids), None, runtime_gather_output=True)
            assert (found[..., NUM_TOKENS:] == -1e4).all()
            difference = (found[..., :NUM_TOKENS] - expected).abs().max().item()
            assert difference < 1e-5, f"{kind}: logits differ by {difference}"
            cuts = find_cuts(model, rank=rank, size=size)
            assert bool(cuts) == (size > 1)
        close_parallel_state()


@pytest.mark.ranks(1, timeout_seconds=170)
def test_logits_are_those_of_the_source() -> None:
    check(list(KINDS))


@pytest.mark.ranks(2, timeout_seconds=170)
def test_logits_of_divided_models_are_those_of_the_source() -> None:
    check(list(KINDS), tensor=2)
