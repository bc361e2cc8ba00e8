import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.saves import save
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, StateError
from drivetrain_checkpoint.loading.discovery import CheckpointInfo
from drivetrain_checkpoint.saving.retention import plan_retention
from drivetrain_state import Context

KINDS = st.sampled_from(["valid", "damaged", "uncompleted"])


def found(number: int, kind: str) -> CheckpointInfo:
    return CheckpointInfo(
        folder=Path(f"step-{number}"),
        committed=kind != "uncompleted",
        manifest=None,
        problem=None if kind == "valid" else kind,
    )


@given(st.lists(KINDS, max_size=12), st.integers(min_value=1, max_value=5))
def test_the_newest_valid_ones_stay(kinds: list[str], keep_last: int) -> None:
    ones = [found(number, kind) for number, kind in enumerate(kinds)]
    gone = set(plan_retention(ones, CheckpointSettings(keep_last=keep_last)))
    valid = [one.folder for one in ones if one.is_valid]
    assert gone.isdisjoint(valid[:keep_last])
    assert gone.isdisjoint(one.folder for one in ones if one.committed and not one.is_valid)
    assert gone >= set(valid[keep_last:])
    if not valid:
        assert not gone


@given(st.lists(KINDS, max_size=12))
def test_unset_keeps_all(kinds: list[str]) -> None:
    assert plan_retention([found(n, kind) for n, kind in enumerate(kinds)], CheckpointSettings()) == ()


def kept_after(checkpointer: Checkpointer, step: int, loss: float | None) -> list[str]:
    save(checkpointer, step, metrics=None if loss is None else {"loss": loss})
    return sorted(path.name for path in checkpointer.directory.glob("step-*"))


def test_the_best_and_every_tenth_stay_besides(tmp_path: Path, context: Context) -> None:
    settings = CheckpointSettings(keep_last=1, keep_best=2, best_metric="loss", keep_every=10)
    checkpointer = Checkpointer(context, tmp_path, settings=settings)
    losses = {9: 0.5, 10: 0.9, 11: 0.2, 12: math.nan, 13: None, 14: 0.4, 15: 0.4}
    kept = [kept_after(checkpointer, step, loss) for step, loss in losses.items()]
    assert kept[-2:] == [["step-10", "step-11", "step-14"], ["step-10", "step-11", "step-15"]]


def test_the_largest_may_be_the_best(tmp_path: Path, context: Context) -> None:
    settings = CheckpointSettings(keep_last=1, keep_best=1, best_metric="loss", best_mode="max")
    checkpointer = Checkpointer(context, tmp_path, settings=settings)
    kept = [kept_after(checkpointer, step, loss) for step, loss in enumerate((0.1, math.inf, 0.3, 0.2))]
    assert kept[-1] == ["step-1", "step-3"]


def test_a_save_that_forgets_the_metric_is_refused(tmp_path: Path, context: Context) -> None:
    settings = CheckpointSettings(keep_last=1, keep_best=1, best_metric="loss")
    with pytest.raises(ValueError, match=r"metrics=\{'los': 1.0\} lacks best_metric='loss'"):
        save(Checkpointer(context, tmp_path, settings=settings), 1, metrics={"los": 1.0})
    with pytest.raises(
        StateError, match=r"metrics\['loss'\]=tensor\(1\.\): must be a number; give tensor\.it"
    ):
        save(Checkpointer(context, tmp_path), 1, metrics={"loss": torch.tensor(1.0)})


def test_the_checkpoints_of_an_earlier_run_stay_unless_one_was_loaded(
    tmp_path: Path, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    settings = CheckpointSettings(keep_last=1)
    earlier = Checkpointer(context, tmp_path, settings=CheckpointSettings())
    for step in (50, 60):
        save(earlier, step)
    earlier.close()
    assert not caplog.records
    forgotten = Checkpointer(context, tmp_path, settings=settings)
    for step in (1, 2):
        save(forgotten, step)
    forgotten.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "holds 2 checkpoints of an earlier run, step-60 the newest" in said
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-50", "step-60"]
    resumed = Checkpointer(context, tmp_path, settings=settings)
    resumed.load()
    save(resumed, 3)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]
