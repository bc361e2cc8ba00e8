import re

import pytest

from drivetrain_checkpoint import CheckpointSettings


def test_all_are_kept_by_default() -> None:
    assert CheckpointSettings().keep_last is None


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(keep_last: int) -> None:
    with pytest.raises(ValueError, match=rf"^keep_last={keep_last}: must be at least 1"):
        CheckpointSettings(keep_last=keep_last)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep_every": 0, "keep_last": 1}, "keep_every=0: must be at least 1 step"),
        ({"keep_best": -1}, "keep_best=-1: must be 0 or more"),
        ({"keep_best": 2, "keep_last": 1}, "keep_best=2 without best_metric: name the metric"),
        ({"keep_best": 2, "best_metric": "loss"}, "keep_best=2 without keep_last: all stay"),
        ({"keep_every": 5}, "keep_every=5 without keep_last: all stay"),
        ({"save_every_steps": 0}, "save_every_steps=0: must be at least 1 step"),
        ({"save_every_minutes": 0.0}, "save_every_minutes=0.0: must be above 0 minutes"),
        ({"save_on_signals": ("TERM",)}, "save_on_signals='TERM': must be the name of a signal"),
        ({"save_on_signals": ("SIGKILL",)}, "save_on_signals='SIGKILL': must be the name of a signal"),
        ({"stall_seconds": 0.0}, "stall_seconds=0.0: must be above 0 seconds"),
    ],
)
def test_rules_that_make_no_sense_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        CheckpointSettings(**values)  # type: ignore[arg-type]
