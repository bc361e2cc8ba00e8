import pytest

from drivetrain_checkpoint import CheckpointSettings


def test_all_are_kept_by_default() -> None:
    assert CheckpointSettings().keep_last is None


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(keep_last: int) -> None:
    with pytest.raises(ValueError, match=rf"^keep_last={keep_last}: must be at least 1"):
        CheckpointSettings(keep_last=keep_last)
