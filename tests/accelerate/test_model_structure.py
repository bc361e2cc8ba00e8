"""What wraps a model, beside the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate import model_structure as ours

real: Any = pytest.importorskip("accelerate.utils.other")
dataclasses: Any = pytest.importorskip("accelerate.utils.dataclasses")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))


MODULES = {
    "nested": nested(),
    "blocks": Blocks(),
    "list": Blocks().layers,
    "one block": nn.ModuleList([nn.Linear(1, 1)]),
    "two classes": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]),
    "no block": nn.ModuleList(),
    "compiled": torch.compile(nested(), backend="eager"),
    "compiled inside": nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager")),
}


def test_a_class_is_found_by_its_name() -> None:
    for name in ("ReLU", "Sequential", "Other"):
        found = [module.get_module_class_from_name(nested(), name) for module in (ours, dataclasses)]
        assert found[0] is found[1]


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_modules_are_told_as_accelerate_tells_them(module: Any) -> None:
    for name in (
        "is_compiled_module",
        "has_compiled_regions",
        "is_repeated_blocks",
        "has_repeated_blocks",
        "model_has_dtensor",
        "get_model_tp_size",
        "get_module_children_bottom_up",
    ):
        assert getattr(ours, name)(module) == getattr(real, name)(module), name
    pairs = ours.get_module_children_bottom_up(module, return_fqns=True)
    assert pairs == real.get_module_children_bottom_up(module, return_fqns=True)


def test_wrappers_are_taken_off() -> None:
    model = nested()
    compiled = torch.compile(model, backend="eager")
    for module in (real, ours):
        assert module.extract_model_from_parallel(nn.DataParallel(model)) is model
        assert module.extract_model_from_parallel(compiled) is compiled
        assert module.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
        whole = nn.Sequential(nn.DataParallel(model))
        assert module.extract_model_from_parallel(whole, recursive=True)[0] is model


def test_a_compiled_wrapper_stays_whole_and_its_inside_comes_back_compiled() -> None:
    model = nested()
    compiled: Any = torch.compile(nn.DataParallel(model), backend="eager")
    inner = ours.extract_model_from_parallel(compiled)
    assert ours.is_compiled_module(inner)
    assert ours.extract_model_from_parallel(inner, keep_torch_compile=False) is model
    assert isinstance(compiled._orig_mod, nn.DataParallel)
    assert inner(torch.ones(1, 1)).shape == (1, 1)


def test_a_replaced_forward_is_put_back() -> None:
    model = nn.Linear(1, 1)
    original = model.forward
    model.forward, model._original_forward = (lambda x: x), original  # type: ignore[assignment]
    assert ours.extract_model_from_parallel(model).forward is not original
    assert ours.extract_model_from_parallel(model, keep_fp32_wrapper=False).forward == original
    assert "_original_forward" not in vars(model)


def test_blocks_are_compiled_in_a_copy_with_the_same_weights() -> None:
    model, x = Blocks(), torch.ones(1, 2)
    for module in (real, ours):
        compiled = module.compile_regions(model, backend="eager")
        assert [ours.is_compiled_module(each) for each in (*compiled.layers, compiled.head)] == [True] * 3
        assert compiled.layers[0]._orig_mod is model.layers[0]
        assert not ours.has_compiled_regions(model)
        with torch.no_grad():  # torch's compiler warns of gradients that it looks for
            assert torch.equal(compiled(x), model(x))
    assert ours.is_compiled_module(ours.compile_regions(nested(), backend="eager"))


def test_blocks_are_compiled_in_place() -> None:
    for module in (real, ours):
        for function in (module.compile_regions_deepspeed, module.compile_regions_fsdp2):
            model = Blocks()
            assert function(model, backend="eager") in (None, model)
            parts = (*model.layers, model.head, model)
            assert [each._compiled_call_impl is not None for each in parts] == [True, True, True, False]
