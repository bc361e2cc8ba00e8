"""The plain form of states that are made of several tensors: bit for bit, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import return_and_correct_aliasing

from drivetrain_backends.state_dict.block_tensors import Restored, as_stored, as_values, has_parts, is_stored
from drivetrain_backends.state_dict.optimizer_state import load_named_state, named_state


class Scaled(Tensor):
    """A state as a library of one's own may have: values, and one factor for all of them; it has no blocks."""

    @staticmethod
    def __new__(cls, codes: Tensor, factor: Tensor) -> "Scaled":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, factor: Tensor) -> None:
        self.codes, self.factor = codes, factor

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "factor"], []

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Scaled":
        return cls(parts["codes"], parts["factor"])

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.factor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            made = cls(args[0].codes, args[0].factor)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(str(func))


class Library(SGD):
    """An optimizer of the package that `Scaled` belongs to: this module."""


def scaled() -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.tensor(0.5))


def test_a_tensor_without_blocks_is_stored_whole_and_restored() -> None:
    stored = as_stored(scaled())
    assert is_stored(stored)
    assert stored["parts"] == {}
    parameter = nn.Parameter(torch.zeros(2, 3))
    found = Restored(Library([parameter])).restore({"state": [stored, 1]}, parameter)["state"]
    assert type(found[0]) is Scaled
    assert found[1] == 1
    assert torch.equal(found[0].dequantize(), scaled().dequantize())


def test_another_librarys_optimizer_gets_the_values() -> None:
    stored = as_stored({"momentum": scaled()})
    parameter = nn.Parameter(torch.zeros(2, 3))
    restored = Restored(SGD([parameter]))
    assert torch.equal(restored.restore(stored, parameter)["momentum"], scaled().dequantize())
    assert restored.notes() == [
        "1 states of another library's optimizer were dequantised into floating point"
    ]
    assert torch.equal(as_values(stored)["momentum"], scaled().dequantize())


def test_a_class_that_nobody_imported_is_not_imported_for_a_checkpoint() -> None:
    stored = {**as_stored(scaled()), "tensor_class": "antigravity:Tensor"}
    with pytest.raises(
        ValueError, match=r"antigravity:Tensor, which is not imported here.*import antigravity"
    ):
        Restored(Library([nn.Parameter(torch.zeros(2, 3))])).restore(stored, None)
    stored = {**stored, "tensor_class": "os:system"}  # imported, and no tensor
    with pytest.raises(ValueError, match="os:system"):
        Restored(Library([nn.Parameter(torch.zeros(2, 3))])).restore(stored, None)


def torchao_states() -> dict[str, Optimizer]:
    optim = pytest.importorskip("torchao.optim")
    found: dict[str, Optimizer] = {}
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        for dtype in (torch.float32, torch.bfloat16):
            parameters = [
                nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((64, 128), (8192,), (3,))
            ]
            optimizer = getattr(optim, name)(parameters)
            for step in range(2):
                for parameter in parameters:
                    generator = torch.Generator().manual_seed(step)
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
                with torch.compiler.set_stance("force_eager"):
                    optimizer.step()
            found[f"{name} {dtype}"] = optimizer
    return found


def test_torchaos_states_are_plain_tensors_and_come_back_bit_for_bit() -> None:
    for name, optimizer in torchao_states().items():
        names = {p: str(i) for i, p in enumerate(optimizer.param_groups[0]["params"])}
        state = named_state(optimizer, names)
        first = state["state"]["0"]["exp_avg"]
        assert {part.dim() for part in first["parts"].values()} == {1}, name
        assert sorted(first["parts"]) == ["codes", "scale"]
        assert list(first["shared"]) == ([] if "Fp8" in name else ["qmap"])
        fresh = type(optimizer)([nn.Parameter(p.detach().clone()) for p in names])
        own = dict(zip(fresh.param_groups[0]["params"], names.values(), strict=True))
        assert load_named_state(fresh, own, state) == []
        for mine, theirs in zip(own, names, strict=True):
            for key, value in optimizer.state[theirs].items():
                _assert_same(fresh.state[mine][key], value)


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if has_parts(one):
        names, _ = one.__tensor_flatten__()
        assert one.shape == other.shape
        for name in names:
            part = getattr(other, name)
            assert torch.equal(getattr(one, name).view(torch.uint8), part.view(torch.uint8))
            assert getattr(one, name).data_ptr() != part.data_ptr() or name == "qmap"
    else:
        assert torch.equal(one, other)


def test_options_keep_the_kind_that_the_optimizer_was_built_with() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    of_numbers, of_tensors = SGD([parameter], lr=0.1), SGD([parameter], lr=torch.tensor(0.2))
    names = {parameter: "p"}
    load_named_state(of_tensors, names, named_state(of_numbers, names))
    assert torch.equal(of_tensors.param_groups[0]["lr"], torch.tensor(0.1))
    of_tensors.param_groups[0]["lr"].fill_(0.5)
    load_named_state(of_numbers, names, named_state(of_tensors, names))
    assert of_numbers.param_groups[0]["lr"] == 0.5
    assert type(of_numbers.param_groups[0]["lr"]) is float
