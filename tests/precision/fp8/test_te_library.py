"""What is the same with and without Transformer Engine; tests/precision/te needs it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_precision import PrecisionError
from drivetrain_precision.fp8.te_layers import from_te, te_refusal, to_te
from drivetrain_precision.fp8.te_recipes import te_recipe, te_recipe_kind, te_unsupported

without = pytest.mark.skipif(bool(find_spec("transformer_engine")), reason="Transformer Engine is installed")
MISSING = (
    r"Transformer Engine cannot be imported .*pip install --no-build-isolation 'drivetrain-precision\[te\]'"
)


@without
def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(ImportError, match=MISSING):
        to_te(nn.Linear(16, 16))
    with pytest.raises(ImportError, match=MISSING):
        from_te(nn.Linear(16, 16))
    with pytest.raises(ImportError, match=MISSING):
        te_recipe("delayed")


@without
def test_a_library_that_is_installed_and_cannot_be_imported_supports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine.py").write_text(
        "raise OSError('libcublas.so.13: cannot open shared object')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reason = te_unsupported("current")
    assert reason is not None
    assert reason.startswith("Transformer Engine cannot be imported (OSError: libcublas.so.13: cannot open")


def test_an_unknown_recipe_needs_no_library_to_be_told() -> None:
    for function in (te_recipe, te_unsupported, te_recipe_kind):
        with pytest.raises(
            PrecisionError, match="'rowwise' is no recipe of Transformer Engine: must be one of"
        ):
            function("rowwise")


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 5), nn.Linear(3, 5, bias=False), nn.LayerNorm((4, 8)), nn.RMSNorm(8, eps=1e-6)]
)
def test_plain_layers_are_accepted(module: nn.Module) -> None:
    assert te_refusal(module) is None
    assert te_refusal(module.to(torch.bfloat16)) is None


class Scaled(nn.Linear):
    pass


def patched() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.forward = lambda input: input
    return layer


def hooked() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_forward_pre_hook(lambda module, inputs: None)
    return layer


def mixed() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(layer.weight.to(torch.bfloat16))
    return layer


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv1d(1, 1, 1), "is a Conv1d, none of"),
        (Scaled(16, 16), "is a Scaled, none of"),
        (patched(), "has a forward of its own"),
        (hooked(), r"has hooks \(_forward_pre_hooks\)"),
        (mixed(), "holds torch.bfloat16, torch.float32"),
        (nn.Linear(16, 16, dtype=torch.float64), "holds torch.float64"),
        (nn.LayerNorm(16, bias=False), "has no bias, which"),
        (nn.RMSNorm(16), "has eps=None, which is another number for each dtype"),
        (nn.RMSNorm(16, eps=1e-6, elementwise_affine=False), "has no weight, which"),
        (nn.LayerNorm(16, elementwise_affine=False), "has no weight and no bias, which"),
    ],
)
def test_other_layers_are_refused_with_the_reason(module: nn.Module, message: str) -> None:
    reason = te_refusal(module)
    assert reason is not None
    assert re.search(message, reason)
