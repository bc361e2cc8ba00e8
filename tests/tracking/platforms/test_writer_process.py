from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker, TrackerGroup, make_trackers
from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.registry import tracker_names

SLOW = [name for name in tracker_names() if name not in ("jsonl", "tensorboard")]


@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_process_beside_delivers_a_whole_run_to_a_platform(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow writes here, and DVCLive makes a repository of DVC of one of Git's
    pytest.importorskip({"comet": "comet_ml", "tensorboard": "tensorboard"}.get(name, name))
    log, platform = make_trackers([name], tmp_path)
    assert isinstance(log, JSONLTracker)
    trackers = TrackerGroup([log, platform])
    trackers.start("whole", {"lr": 0.1}, plan={"backend": "ddp"}, info={"python": "3.11", "git": None})
    for step in range(3):
        trackers.log({"loss": 1.0 / (step + 1), "note": "warm"}, step=step)
    trackers.finish()
    printed = (tmp_path / f"{platform.name}.writer.log").read_text()
    delivery = Delivery.load(delivery_path(log.path, platform.name))
    # The start, the plan, what surrounds the run, three records and the end.
    assert (delivery.num_delivered, delivery.num_refused) == (7, 0), printed
