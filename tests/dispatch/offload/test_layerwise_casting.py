import copy

import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.dispatch import remove_hooks
from drivetrain_dispatch.offload.layerwise_casting import apply_layerwise_casting


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_weights_are_rounded_once_and_computed_in_the_other_dtype(storage: torch.dtype) -> None:
    cast, plain = model(), model().bfloat16()
    rounded = copy.deepcopy(plain)
    for layer in (rounded[1], rounded[3]):
        for parameter, exact in zip(
            layer.parameters(), model()[list(rounded).index(layer)].parameters(), strict=True
        ):
            parameter.data = exact.data.to(storage).to(torch.bfloat16)
    apply_layerwise_casting(cast, storage, torch.bfloat16)
    batch = torch.arange(16)
    with torch.no_grad():
        assert torch.equal(cast(batch), rounded(batch))
        assert not torch.equal(cast(batch), plain(batch))
    assert {name: parameter.dtype for name, parameter in cast.named_parameters()} == {
        "0.weight": torch.bfloat16,
        "1.weight": storage,
        "1.bias": storage,
        "2.weight": torch.bfloat16,
        "2.bias": torch.bfloat16,
        "3.weight": storage,
        "3.bias": storage,
    }
    remove_hooks(cast)
    assert cast[1].weight.dtype == storage


def test_a_weight_is_skipped_under_all_its_names() -> None:
    tied = nn.ModuleDict(
        {"embed": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False), "out": nn.Linear(4, 4)}
    )
    tied["head"].weight = tied["embed"].weight
    apply_layerwise_casting(tied, torch.float8_e4m3fn, torch.float32)
    assert tied["head"].weight is tied["embed"].weight
    assert tied["head"].weight.dtype == torch.float32
    assert tied["out"].weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("storage", "compute", "given", "message"),
    [
        ("float8_e4m3fn", torch.bfloat16, {}, r"storage_dtype='float8_e4m3fn' .* give torch\.float8_e4m3fn"),
        (torch.float16, "bfloat16", {}, r"compute_dtype='bfloat16' is no torch\.dtype: give torch\.bfloat16"),
        (torch.float16, torch.float8_e5m2, {}, r"compute_dtype=torch\.float8_e5m2: no layer computes in it"),
        (
            torch.float16,
            torch.float32,
            {"skip_modules_pattern": "norm("},
            "'norm\\(' is no regular expression",
        ),
        (torch.float16, torch.float32, {"skip_modules_pattern": [nn.Linear]}, "is no regular expression"),
        (
            torch.float16,
            torch.float32,
            {"skip_modules_classes": "LayerNorm"},
            "skip_modules_classes='LayerNorm'",
        ),
        (
            torch.float16,
            torch.float32,
            {"skip_modules_classes": ["LayerNorm"]},
            "belong to skip_modules_pattern",
        ),
        (torch.float16, torch.float32, {"skip_modules_classes": nn.Linear}, "give classes such as"),
    ],
)
def test_arguments_are_checked_before_anything_is_converted(
    storage: torch.dtype, compute: torch.dtype, given: dict[str, object], message: str
) -> None:
    cast = model()
    with pytest.raises(ValueError, match=message):
        apply_layerwise_casting(cast, storage, compute, **given)
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float32}


def test_what_cannot_be_done_is_said_and_changes_nothing() -> None:
    cast = model()
    with pytest.raises(ValueError, match=r"storage_dtype=torch\.int8: must be a floating-point"):
        apply_layerwise_casting(cast, torch.int8, torch.float32)
    with pytest.raises(ValueError, match="nothing to store"):
        apply_layerwise_casting(cast, torch.float16, torch.float32, skip_modules_pattern="weight|bias")
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float32}
    apply_layerwise_casting(cast, torch.float16, torch.float32)
    with pytest.raises(OffloadedError, match="dispatched already"):
        apply_layerwise_casting(cast, torch.float16, torch.float32)
