"""A lazy tensor has the shape that an operation gives, and reads into memory what the operation computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_weights import MappedFile

Tensors = list[Tensor]
EXPRESSIONS: dict[str, Callable[[Tensors], Any]] = {
    "one": lambda held: held[0],
    "stacked": lambda held: torch.stack(held),
    "stacked last": lambda held: torch.stack(held, dim=-1),
    "concatenated": lambda held: torch.cat(held, dim=1),
    "experts": lambda held: torch.cat([torch.stack(held), torch.stack(held[::-1])], dim=1),
    "transposed experts": lambda held: (
        torch.cat([torch.stack(held), torch.stack(held)], dim=1).transpose(1, 2).contiguous()
    ),
    "reshaped": lambda held: torch.stack(held).reshape(-1, held[0].shape[-1]),
    "reshaped after a transpose": lambda held: (
        torch.stack(held).transpose(0, 1).reshape(held[0].shape[0], -1)
    ),
    "split": lambda held: torch.chunk(held[0], 2)[1].contiguous(),
    "split by columns": lambda held: torch.split(held[0], [1, held[0].shape[1] - 1], dim=1)[1].contiguous(),
    "permuted": lambda held: held[0].view(2, -1, held[0].shape[1]).transpose(0, 1).reshape(held[0].shape),
    "computed": lambda held: held[0] * 2 + held[1],
    "parts of a whole": lambda held: torch.stack([torch.cat(held)[2], torch.cat(held)[0]]),
}


def in_a_file(folder: Path, tensors: Tensors) -> list[LazyTensor]:
    """Write tensors to a file, and return the lazy ones."""
    path = folder / "x.safetensors"
    save_file({f"t{index}": tensor for index, tensor in enumerate(tensors)}, path)
    file = MappedFile(path)
    return [LazyTensor.in_file(file, f"t{index}") for index in range(len(tensors))]


@pytest.mark.parametrize("name", EXPRESSIONS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 4),
    columns=st.integers(2, 5),
    count=st.integers(2, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_what_is_read_is_what_the_operations_give(
    tmp_path: Path, name: str, rows: int, columns: int, count: int, dtype: torch.dtype
) -> None:
    tensors = [torch.randint(-99, 99, (2 * rows, columns)).to(dtype) for _ in range(count)]
    wanted: Tensor = EXPRESSIONS[name](tensors)
    lazy: LazyTensor = EXPRESSIONS[name](in_a_file(tmp_path, tensors))

    assert isinstance(lazy, LazyTensor)
    assert (lazy.shape, lazy.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(lazy.values(), wanted)
    for target in (
        torch.full_like(wanted, 7),
        torch.full_like(wanted, 7).double(),
        torch.full_like(wanted, 7).mT.contiguous().mT,
    ):
        lazy.read_into(target)
        assert torch.equal(target, wanted.to(target.dtype))


@pytest.mark.parametrize(
    ("name", "mapped"),
    [("one", True), ("split", True), ("stacked", False), ("split by columns", False), ("computed", False)],
)
def test_views_of_one_tensor_are_pages_of_its_file(tmp_path: Path, name: str, mapped: bool) -> None:
    held = in_a_file(tmp_path, [torch.rand(4, 6) for _ in range(2)])
    lazy: LazyTensor = EXPRESSIONS[name](held)

    assert (lazy.mapped_file() is not None) is mapped
    start = held[0].values().untyped_storage().data_ptr()
    assert (lazy.values().untyped_storage().data_ptr() == start) is mapped


@pytest.mark.parametrize("name", ["experts", "transposed experts"])
def test_what_is_joined_is_read_one_tensor_after_the_other(tmp_path: Path, name: str) -> None:
    tensors = [torch.rand(1024, 1024) for _ in range(8)]  # 4 MiB each
    lazy: LazyTensor = EXPRESSIONS[name](in_a_file(tmp_path, tensors))
    target = torch.zeros(lazy.shape)
    peak = PeakOfAllocations()
    with peak:
        lazy.read_into(target)

    assert torch.equal(target, EXPRESSIONS[name](tensors))
    assert peak.size_bytes <= 8 << 20  # the buffer of a read, or one of the 64 MiB of tensors


class PeakOfAllocations(TorchDispatchMode):
    """Notes the largest tensor that operations make, but for views."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it makes."""
        result = func(*args, **(kwargs or {}))
        given_memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given_memory:
            self.size_bytes = max(self.size_bytes, result.untyped_storage().nbytes())
        return result


def test_recipes_tell_other_operations_and_other_files_apart(tmp_path: Path) -> None:
    first = in_a_file(tmp_path, [torch.ones(2, 2), torch.ones(2, 2)])
    texts = {EXPRESSIONS[name](first).recipe() for name in EXPRESSIONS}
    assert len(texts) == len(EXPRESSIONS)
    assert EXPRESSIONS["experts"](first).recipe() in texts
    again = in_a_file(tmp_path, [torch.ones(2, 2), torch.zeros(2, 2)])
    assert EXPRESSIONS["experts"](again).recipe() not in texts


def test_a_file_that_was_cut_is_told(tmp_path: Path) -> None:
    lazy = torch.stack(in_a_file(tmp_path, [torch.ones(512, 512), torch.ones(512, 512)]))
    assert isinstance(lazy, LazyTensor)
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(WeightFilesError, match="was cut"):
        lazy.read_into(torch.zeros(2, 512, 512))


def test_what_is_joined_is_read_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = in_a_file(tmp_path, [torch.full((4, 4), float(index)) for index in range(6)])
    starts: list[int | None] = []
    copy = MappedFile.copy

    def noted(file: MappedFile, name: str, *args: Any, **kwargs: Any) -> None:
        starts.append(file.start_of(name))
        copy(file, name, *args, **kwargs)

    monkeypatch.setattr(MappedFile, "copy", noted)
    lazy: LazyTensor = torch.stack([held[index] for index in (3, 0, 5, 1, 4, 2)])  # type: ignore[assignment]
    lazy.read_into(torch.empty(6, 4, 4))
    assert len(starts) == 6
    assert starts == sorted(starts)
