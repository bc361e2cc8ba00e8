import gc
import inspect
import weakref

import pytest
import torch

from drivetrain_memory import NoBatchSizeFitsError, find_executable_batch_size

IMPOSSIBLE_BYTES = 2**60


def host_runs_out() -> None:
    torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)


def test_it_halves_until_it_fits_and_returns_what_the_function_does(caplog) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int, name: str, *, epochs: int = 1) -> str:
        tried.append(batch_size)
        if batch_size > 20:
            host_runs_out()
        return f"{name} {epochs} {batch_size}"

    assert train("model", epochs=2) == "model 2 16"
    assert tried == [64, 32, 16]
    assert "train ran out of memory at batch size 64 (RuntimeError" in caplog.text
    assert "trying 32" in caplog.text
    assert train("again") == "again 1 16"
    assert tried[3:] == [64, 32, 16]


def test_it_decorates_without_arguments() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> int:
        """Train."""
        return batch_size

    assert train() == 128
    assert train.__doc__ == "Train."


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("MPS backend out of memory"),
    ],
)
def test_every_kind_of_running_out_counts(error: Exception) -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        if batch_size > 1:
            raise error
        return batch_size

    assert train() == 1


def test_any_other_error_comes_through_at_once() -> None:
    tried: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        train()
    assert tried == [128]


def test_if_none_fits_it_says_what_was_tried_and_what_failed() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        host_runs_out()

    with pytest.raises(
        NoBatchSizeFitsError, match=r"train ran out of memory at every batch size: 2 \(Runtime.*; 1 \("
    ):
        train()


def test_what_a_failed_try_held_is_given_back() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> int:
        held = torch.ones(10)
        gc.disable()
        assert all(one() is None for one in alive)
        alive.append(weakref.ref(held))
        if batch_size > 1:
            host_runs_out()
        return batch_size

    try:
        assert train() == 1
    finally:
        gc.enable()


def test_another_rule_may_reduce() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10, reduce_batch_size=lambda size: size - 4)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        host_runs_out()

    with pytest.raises(NoBatchSizeFitsError, match="every batch size"):
        train()
    assert tried == [10, 6, 2]


def test_a_rule_that_does_not_reduce_is_refused() -> None:
    @find_executable_batch_size(reduce_batch_size=lambda size: size)
    def train(batch_size: int) -> None:
        host_runs_out()

    with pytest.raises(ValueError, match=r"reduce_batch_size\(128\) gave 128: it must give a smaller"):
        train()


def test_callers_see_a_signature_without_the_batch_size_and_are_held_to_it() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str) -> None:
        raise AssertionError("it must not be called")

    assert list(inspect.signature(train).parameters) == ["model"]
    with pytest.raises(
        TypeError, match=r"train.*too many positional arguments\. The batch size is passed for you"
    ):
        train(32, "model")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        train()  # type: ignore[call-arg]


def test_functions_that_cannot_be_searched_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes no batch size: its first argument must be the batch size"):
        find_executable_batch_size(lambda: None)  # type: ignore[arg-type]

    async def later(batch_size: int) -> None: ...

    with pytest.raises(TypeError, match="does its work after its call returned"):
        find_executable_batch_size(later)


def test_a_start_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="starting_batch_size=0: must be at least 1"):
        find_executable_batch_size(starting_batch_size=0)
