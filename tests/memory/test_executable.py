import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory import ExecutableBatchSize, TryOutcome, accumulation_steps, find_executable_batch_size


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
