"""Curves that are read from a run's log, and their picture."""

from math import isnan, nan
from pathlib import Path
from xml.etree import ElementTree

from drivetrain.hub.run_curves import MetricCurve, draw_losses, read_curves
from drivetrain_tracking import JSONLTracker


def write_log(folder: Path, config: dict[str, object], steps: dict[int, float]) -> None:
    log = JSONLTracker(folder)
    log.start("run", config)
    for step, loss in steps.items():
        log.log({"loss": loss}, step=step)
    log.finish()


def test_a_resumed_run_is_one_curve_without_the_steps_that_it_repeated(tmp_path: Path) -> None:
    write_log(tmp_path, {}, {0: 4.0, 1: 3.0, 2: 9.0, 3: 9.0})
    write_log(tmp_path, {"lr": 0.1, "model": {"depth": 2, "name": "secret"}}, {2: 2.0, 3: nan})
    config, [curve] = read_curves(tmp_path / "log.jsonl")
    assert config == {"lr": 0.1, "model/depth": 2}
    assert curve.points == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert isnan(curve.last)


def test_a_long_curve_keeps_its_extremes(tmp_path: Path) -> None:
    write_log(tmp_path, {}, {step: 0.001 if step == 777 else 1 + step % 7 for step in range(3000)})
    _, [curve] = read_curves(tmp_path / "log.jsonl")
    assert len(curve.points) < 1000
    assert min(curve.points, key=lambda point: point[1]) == (777, 0.001)


def test_no_log_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "log.jsonl") == ({}, [])


def test_a_picture_holds_the_losses_alone_and_is_valid_with_any_name() -> None:
    curves = [
        MetricCurve(name="accuracy", last=1, points=[(0, 0.5)]),
        MetricCurve(name="loss<&>", last=1, points=[(5, 2.0)]),
        MetricCurve(name="eval/Loss", last=1, points=[(0, 2.0), (10, 1.0)]),
        MetricCurve(name="loss of nothing", last=nan, points=[]),
    ]
    picture = draw_losses(curves)
    assert picture is not None
    texts = [node.text for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("text")]
    assert [text for text in texts if text and "oss" in text] == ["loss<&>", "eval/Loss"]
    assert picture.count("<polyline") == 2
    assert draw_losses(curves[:1]) is None
