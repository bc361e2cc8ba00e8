"""The search for a batch size, beside the installed Accelerate."""

from typing import Any

import pytest
import torch

from drivetrain_accelerate import memory

real: Any = pytest.importorskip("accelerate.utils.memory")


def training(limit: int, tried: list[int], message: str = "CUDA out of memory.") -> Any:
    def train(batch_size: int, x: Any, y: int = 1) -> tuple[int, Any, int]:
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError(message)
        return batch_size, x, y

    return train


@pytest.mark.parametrize(
    ("start", "limit", "message"),
    [
        (16, 4, "CUDA out of memory."),
        (5, 2, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        (5, 9, "CUDA out of memory."),
    ],
)
def test_sizes_are_tried_as_accelerate_tries_them(start: int, limit: int, message: str) -> None:
    by_library: list[tuple[list[int], Any]] = []
    for module in (real, memory):
        tried: list[int] = []
        search = module.find_executable_batch_size(training(limit, tried, message), starting_batch_size=start)
        by_library.append((tried, [search(7, y=2), search(7)]))  # the second call starts at what fitted
    assert by_library[0] == by_library[1]


def test_a_method_gets_its_object_before_the_size() -> None:
    class Trainer:
        @memory.find_executable_batch_size(starting_batch_size=4)
        def train(self, batch_size: int, y: int = 1) -> tuple[object, int, int]:
            if batch_size > 3:
                raise RuntimeError("CUDA out of memory.")
            return self, batch_size, y

    trainer = Trainer()
    assert trainer.train(y=2) == (trainer, 3, 2)


def test_the_next_size_is_the_programs_if_it_says_one() -> None:
    tried: list[int] = []
    decorate = memory.find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: 3)
    assert decorate(training(4, tried))(1) == (3, 1, 1)
    assert tried == [100, 3]


def test_errors_are_of_the_classes_of_accelerate() -> None:
    for module in (real, memory):
        none_fits = module.find_executable_batch_size(training(0, []), starting_batch_size=4)
        with pytest.raises(RuntimeError, match=r"(?i)no (executable )?batch size f"):
            none_fits(1)
        other = module.find_executable_batch_size(training(1, [], "no such file"), starting_batch_size=4)
        with pytest.raises(RuntimeError, match="no such file"):
            other(1)
        with pytest.raises(TypeError):
            module.find_executable_batch_size(lambda: 1)()
        with pytest.raises(TypeError):
            module.find_executable_batch_size(training(4, []))(128, 1, 2)


def test_a_size_that_does_not_shrink_is_an_error() -> None:
    search = memory.find_executable_batch_size(
        training(1, []), starting_batch_size=8, reduce_batch_size_fn=lambda: 8
    )
    with pytest.raises(ValueError, match="must give a smaller batch size"):
        search(1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory."),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("x"),
        ValueError("CUDA out of memory."),
    ],
    ids=str,
)
def test_errors_of_memory_are_told_as_accelerate_tells_them(error: Exception) -> None:
    assert memory.should_reduce_batch_size(error) == real.should_reduce_batch_size(error)


def test_errors_of_memory_that_accelerate_does_not_know() -> None:
    assert memory.should_reduce_batch_size(torch.OutOfMemoryError("no more"))
    assert memory.should_reduce_batch_size(MemoryError())


def test_released_objects_with_other_references_stay_whole() -> None:
    layer = torch.nn.Linear(2, 2)
    assert memory.release_memory(layer, 1) == [None, None]
    assert layer.weight.shape == (2, 2)
    assert memory.release_memory() == []
    memory.clear_device_cache(garbage_collection=True)
