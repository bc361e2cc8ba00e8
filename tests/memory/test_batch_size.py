import copy
import gc
import inspect
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory import (
    ExecutableBatchSize,
    NoBatchSizeFitsError,
    TryOutcome,
    accumulation_steps,
    find_executable_batch_size,
)

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
@pytest.mark.default_cases("error3")
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


@pytest.mark.slow
def test_if_none_fits_it_says_what_was_tried_and_what_failed() -> None:
    @find_executable_batch_size(starting_batch_size=10, reduce_batch_size=lambda size: size - 4)
    def train(batch_size: int) -> None:
        host_runs_out()

    told = r"train ran out of memory at every batch size: 10 \(Runtime.*; 6 \(.*; 2 \("
    with pytest.raises(NoBatchSizeFitsError, match=told):
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
    for size, shown in ((0, "0"), ("16", "'16'"), (1.5, "1.5")):
        with pytest.raises(ValueError, match=f"starting_batch_size={shown}: must be an integer, at least 1"):
            find_executable_batch_size(starting_batch_size=size)  # type: ignore[call-overload]


def fitting(batch_size: int) -> int:
    if batch_size > 2:
        raise MemoryError
    return batch_size


@pytest.mark.slow
def test_a_class_method_finds_its_class_without_being_bound() -> None:
    class Trainer:
        @classmethod
        @find_executable_batch_size
        def train(cls, batch_size: int) -> tuple[type, int]:
            return cls, fitting(batch_size)

    inside = vars(Trainer)["train"].__func__
    assert inside(Trainer) == (Trainer, 2)  # as Python calls it from 3.13 on


@find_executable_batch_size
def of_the_module(batch_size: int, rate: float) -> float:
    return rate


def test_a_search_keeps_the_looks_of_its_function() -> None:
    assert pickle.loads(pickle.dumps(of_the_module)) is of_the_module
    assert of_the_module.__name__ == "of_the_module"
    assert list(inspect.signature(of_the_module).parameters) == ["rate"]


class Trainer:
    """Of the module, as what is pickled must be."""

    name = "object"

    @find_executable_batch_size
    def method(self, batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return self.name, fitting(batch_size), rate

    @find_executable_batch_size
    @classmethod
    def of_class(cls, batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return cls.name, fitting(batch_size), rate

    @classmethod
    @find_executable_batch_size
    def of_class_outside(cls, batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return cls.name, fitting(batch_size), rate

    @find_executable_batch_size
    @staticmethod
    def static(batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return "object", fitting(batch_size), rate

    @staticmethod
    @find_executable_batch_size
    def static_outside(batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return "object", fitting(batch_size), rate

    def plain(self, batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return self.name, fitting(batch_size), rate

    def __call__(self, batch_size: int, rate: float = 0.5) -> tuple[str, int, float]:
        return self.name, fitting(batch_size), rate


class DerivedTrainer(Trainer):
    def method(self, rate: float = 0.5) -> Any:  # type: ignore[override]
        return super().method(rate=rate)  # type: ignore[call-arg]


PICKLED = {
    "a method": Trainer().method,
    "a derived method": DerivedTrainer().method,
    "a method of the class": partial(Trainer.method, Trainer()),
    "a class method": Trainer.of_class,
    "a class method of a derived class": DerivedTrainer.of_class,
    "a class method of an object": Trainer().of_class,
    "a class method, found inside": Trainer.of_class_outside,
    "a static method": Trainer.static,
    "a static method of an object": Trainer().static,
    "a static method, found inside": Trainer.static_outside,
}
NOT_PICKLED = {
    "a bound method": find_executable_batch_size(Trainer().plain),
    "an object": find_executable_batch_size(Trainer()),
    "a partial function": find_executable_batch_size(partial(Trainer.plain, Trainer())),
}


@pytest.mark.parametrize("kind", PICKLED | NOT_PICKLED)
@pytest.mark.default_cases("a method")
def test_the_size_goes_to_the_argument_after_the_object(kind: str) -> None:
    search: Any = (PICKLED | NOT_PICKLED)[kind]
    assert search(0.1) == search(rate=0.1) == ("object", 2, 0.1)


@pytest.mark.slow
def test_a_partial_keyword_stays() -> None:
    assert find_executable_batch_size(partial(Trainer().plain, rate=0.1))() == ("object", 2, 0.1)


@pytest.mark.parametrize("kind", PICKLED)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.slow
def test_what_searches_is_pickled_and_still_does(kind: str, protocol: int) -> None:
    search: Any = pickle.loads(pickle.dumps(PICKLED[kind], protocol))
    assert search(rate=0.1) == ("object", 2, 0.1)


@pytest.mark.slow
def test_a_method_is_copied_with_its_object() -> None:
    one = Trainer()
    one.name = "another"
    copied = copy.deepcopy({"object": one, "search": one.method})
    one.name = "changed"
    assert copied["search"](rate=0.1) == ("another", 2, 0.1)
    assert copied["search"].__self__ is copied["object"]


@pytest.mark.parametrize(
    "kind", ["a method", "a class method", "a class method, found inside", "a static method"]
)
def test_a_method_is_shown_as_it_is_called(kind: str) -> None:
    search: Any = PICKLED[kind]
    assert list(inspect.signature(search).parameters) == ["rate"]
    assert list(inspect.signature(Trainer.method).parameters) == ["self", "rate"]


@pytest.mark.slow
def test_a_partial_function_and_an_object_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __call__(self, batch_size: int, rate: float) -> None:
            raise MemoryError

    for search in (find_executable_batch_size(Trainer()), find_executable_batch_size(partial(Trainer()))):
        with pytest.raises(NoBatchSizeFitsError, match=r"Trainer ran out of memory at every batch size"):
            search(0.1)
        with pytest.raises(TypeError, match=r"Trainer\(rate: float\).*The batch size is passed for you"):
            search(64, 0.1)


@given(start=st.integers(1, 5000), share=st.floats(0.001, 1), steps=st.integers(1, 16))
def test_the_global_batch_never_shrinks_and_grows_by_less_than_a_micro_batch(
    start: int, share: float, steps: int
) -> None:
    size = max(1, int(start * share))
    found = accumulation_steps(start, size, steps=steps) * size
    assert start * steps <= found < start * steps + size


def test_a_batch_above_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match="at most the starting one"):
        accumulation_steps(4, 8)


@pytest.mark.slow
def test_an_answer_is_remembered_and_saved() -> None:
    answer, tried = ExecutableBatchSize(), []

    @find_executable_batch_size(starting_batch_size=32, remembered=answer)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 8:
            raise MemoryError
        return batch_size

    assert [train(), train()] == [8, 8]
    assert tried == [32, 16, 8, 8]
    later = ExecutableBatchSize()
    later.load_state_dict(answer.state_dict())
    assert later == answer


@pytest.mark.slow
def test_a_rank_gives_up_what_did_not_fit_elsewhere() -> None:
    said, told = iter([TryOutcome.OUT_OF_MEMORY, TryOutcome.OUT_OF_MEMORY, TryOutcome.FITS]), []

    def agree(outcome: TryOutcome) -> TryOutcome:
        told.append(outcome)
        return next(said)

    @find_executable_batch_size(starting_batch_size=8, agree=agree)
    def train(batch_size: int) -> int:
        if batch_size == 4:
            raise ConnectionError("the other rank closed the connection")
        return batch_size

    assert train() == 2
    assert told == [TryOutcome.FITS, TryOutcome.FAILED, TryOutcome.FITS]


def test_a_failure_for_another_reason_is_raised_after_all_were_told() -> None:
    told: list[TryOutcome] = []

    def agree(outcome: TryOutcome) -> TryOutcome:
        told.append(outcome)
        return outcome

    @find_executable_batch_size(agree=agree)
    def train(batch_size: int) -> int:
        raise KeyError("shape")

    with pytest.raises(KeyError, match="shape"):
        train()
    assert told == [TryOutcome.FAILED]
