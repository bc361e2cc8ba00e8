"""Weights that are packed as they are read, by a way of packing that these tests bring themselves."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import RunRanks
from drivetrain_dispatch.errors import LoadError
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model
from drivetrain_dispatch.model.quantized_tensor import (
    parts_of,
)

WIDTH = 64


class Rows(Tensor):
    """A weight as bytes and a scale for each row."""

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> "Rows":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> "Rows":
        return cls(inner["values"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales)
        raise NotImplementedError(str(func))


class ByRows:
    """Packs weights so; its weight of number `fails_at` fails."""

    skip_modules = None

    def __init__(self, fails_at: int | None = None) -> None:
        self.full: list[weakref.ref[Tensor]] = []
        self._fails_at = fails_at

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return shape[0] * shape[1] + shape[0] * dtype.itemsize

    def pack(self, weight: Tensor) -> nn.Parameter:
        assert all(earlier() is None for earlier in self.full)  # one alone is held in full
        self.full.append(weakref.ref(weight))
        if len(self.full) == self._fails_at:
            raise ValueError("cannot be packed")
        scales = weight.abs().amax(1, keepdim=True) / 127
        return nn.Parameter(Rows((weight / scales).round().to(torch.int8), scales), requires_grad=False)

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        return None


def build(num_layers: int = 4) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Tensor]:
    values = {name: torch.randn(value.shape) for name, value in build().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    return values


def assert_packed(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, values[name])
        else:
            assert torch.equal(parameter.values, ByRows().pack(values[name]).values)
            assert torch.equal(parameter.scales, ByRows().pack(values[name]).scales)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_each_weight_is_packed_when_it_comes(tmp_path: Path, values: dict[str, Tensor], place: str) -> None:
    model, told = build(), []
    report = load_checkpoint_in_model(
        model,
        tmp_path,
        {"": place},
        quantization=ByRows(),
        offload_folder=tmp_path / "offloaded",
        progress=lambda done, total: told.append((done, total)),
    )
    assert_packed(model, values)
    read = sum(value.nbytes for name, value in values.items() if place == "cpu" or name.endswith("weight"))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (read, read)
    assert {total for _, total in told} == {read}
    assert set(report.mapped) == (set(values) if place == "disk" else set())
    assert report.converted_at_use == {}


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_after_an_error_the_model_and_the_folder_are_as_they_were(
    tmp_path: Path, values: dict[str, Tensor], place: str
) -> None:
    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="cannot be packed"):
        load_checkpoint_in_model(
            model,
            tmp_path,
            {"": place},
            quantization=ByRows(fails_at=3),
            offload_folder=tmp_path / "offloaded",
        )
    assert all(tensor is before[name] and tensor.is_meta for name, tensor in model.named_parameters())
    assert not any((tmp_path / "offloaded").glob("*"))


class NoMemory(ByRows):
    """The device has none for the third weight."""

    def pack(self, weight: Tensor) -> nn.Parameter:
        if len(self.full) == 2:
            raise torch.OutOfMemoryError("of the device")
        return super().pack(weight)


def test_a_device_without_room_says_what_went_before(tmp_path: Path, values: dict[str, Tensor]) -> None:
    with pytest.raises(LoadError, match=r"cpu has no room for '2\.weight'.*is as it was"):
        load_checkpoint_in_model(build(), tmp_path, {"": "cpu"}, quantization=NoMemory())


def load_by_rank_0(folder: str, fails: bool) -> Any:
    """What a rank gets that rank 0 reads for; rank 1 may fail at its second weight."""
    model = build()
    quantization = ByRows(fails_at=2 if fails and dist.get_rank() == 1 else None)
    try:
        load_checkpoint_in_model(model, folder, read_by="rank 0", quantization=quantization)
    except (RuntimeError, ValueError) as error:
        assert all(parameter.is_meta for parameter in model.parameters())
        return str(error)
    return [part for parameter in model.parameters() for part in parts_of(parameter.detach())]


def test_rank_0_reads_for_all(run_ranks: RunRanks, tmp_path: Path, values: dict[str, Tensor]) -> None:
    alone = build()
    load_checkpoint_in_model(alone, tmp_path, quantization=ByRows())
    expected = [part for parameter in alone.parameters() for part in parts_of(parameter.detach())]
    for parts in run_ranks(load_by_rank_0, str(tmp_path), False):
        assert all(torch.equal(*pair) for pair in zip(parts, expected, strict=True))
    one, other = run_ranks(load_by_rank_0, str(tmp_path), True)
    assert "rank 1 could not load" in one
    assert "cannot be packed" in other
