import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.aim import AimTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from optional_modules import import_later
from tracking.platforms.platform_tests import QuietPlatformTests, started

aim, contexts = import_later("aim"), import_later("aim.storage.context")
pytestmark = pytest.mark.slow  # its import and a repository take 15 seconds


class InOneRepository(AimTracker):
    """A tracker whose run is in a repository that all tests share: to make one takes two seconds."""

    place = ""

    def open(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._options = replace(self._options, repo=self._options.repo or self.place)
        super().open(run_name, config)


class TestAim(QuietPlatformTests):
    tracker = AimTracker
    libraries = ("forked_aim",)

    def make(self, directory: Path) -> AimTracker:
        return InOneRepository(directory)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        run_hash = AimTracker(directory).run_id("contract")
        return [] if run_hash is None else read(InOneRepository.place, run_hash)

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {k: v if isinstance(v, str) else float(v) for k, v in flat_values(values).items()}

    def prepare_kills(self, directory: Path) -> Mapping[str, Any]:
        shutil.copytree(Path(InOneRepository.place) / ".aim", directory / ".aim")
        return {}

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return read(str(directory), AimTracker(directory).run_id("killed"))

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        run = reopened(tracker)
        for name in ("image", "figure"):
            (image,) = sequence(run, "images", name, {})[2]
            assert (image.to_pil_image().size, image.caption) == ((4, 3), "a caption")
        (audio,) = sequence(run, "audios", "audio", {})[2]
        assert bytes(audio.storage["data"]) == media["audio"].path.read_bytes()
        (text,) = sequence(run, "texts", "text", {})[2]
        assert text.data == "<b>said</b>"
        (histogram,) = sequence(run, "distributions", "histogram", {})[2]
        assert (list(histogram.weights), list(histogram.range)) == ([1, 4, 2], [0.0, 3.0])
        (artifact,) = run.artifacts.values()
        assert Path(artifact.download(str(directory.parent / "there"))).read_text() == "an artifact"

    def open_live(self, directory: Path) -> Any:
        quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
        return aim.Run(repo=InOneRepository.place, experiment="mine", **quiet)

    def check_live(self, directory: Path, live: Any) -> None:
        live.track(0.25, name="loss", step=2)
        assert (live["hparams", "lr"], live.experiment) == (0.1, "mine")
        assert sequence(live, "metric", "loss", {})[2] == [0.5, 0.25]
        live.close()
        assert not list(directory.iterdir())


def read(place: str, run_hash: str) -> list[tuple[int, dict[str, object]]]:
    """Return the steps and values of a run as Aim's own reader finds them, by the times of the values."""
    repo = aim.Repo.from_path(place)
    compat.aim_add_to_index(aim.Run(run_hash, repo=repo, read_only=True))  # an open run is not in it yet
    run = aim.Run(run_hash, repo=repo, read_only=True)
    found: dict[tuple[float, int], dict[str, object]] = {}
    for kind in ("metric", "texts"):
        for info in run.collect_sequence_info(kind)[kind]:
            steps, times, values = sequence(run, kind, info["name"], info["context"])
            for step, value, time in zip(steps, values, times, strict=True):
                found.setdefault((time, step), {})[info["name"]] = value.data if kind == "texts" else value
    return [(step, found[time, step]) for time, step in sorted(found)]


def sequence(
    run: Any, kind: str, name: str, context: Mapping[str, Any]
) -> tuple[list[int], list[float], list[Any]]:
    """Return the steps, times and values of a sequence."""
    get = {
        "metric": run.get_metric,
        "texts": run.get_text_sequence,
        "images": run.get_image_sequence,
        "audios": run.get_audio_sequence,
        "distributions": run.get_distribution_sequence,
    }[kind]
    steps, (values, _, times) = get(name, contexts.Context(context)).data.items_list()
    return steps, times, values


@pytest.fixture(scope="module", autouse=True)
def shared_repository(tmp_path_factory: pytest.TempPathFactory) -> None:
    InOneRepository.place = str(tmp_path_factory.mktemp("aim"))
    aim.Repo.from_path(InOneRepository.place, init=True)


def reopened(tracker: AimTracker) -> Any:
    return aim.Run(tracker.run_id("run"), repo=aim.Repo.from_path(InOneRepository.place), read_only=True)


def test_queries_find_a_finished_run_with_its_configuration_tags_and_plan(tmp_path: Path) -> None:
    tracker = started(InOneRepository(tmp_path), experiment="trial", tags=("first", "short"))
    tracker.record_plan({"world_size": 2})
    tracker.log({"loss": 0.5}, step=3)
    tracker.finish()
    repo = aim.Repo.from_path(InOneRepository.place)
    (found,) = [one.run for one in repo.query_runs("run.experiment == 'trial'").iter_runs()]
    assert found["hparams"] == {"lr": 0.1, "model": {"width": 8}}
    assert found["plan", "world_size"] == 2
    assert (found.name, sorted(found.tags)) == ("run", ["first", "short"])
    assert not found.active


def test_numbers_that_are_none_stay_and_none_is_left_out(tmp_path: Path) -> None:
    tracker = started(InOneRepository(tmp_path))
    tracker.log({"loss": math.nan, "norm": -math.inf, "best": None, "done": True})
    tracker.finish()
    ((step, values),) = read(InOneRepository.place, tracker.run_id("run"))
    assert math.isnan(values.pop("loss"))
    assert (step, values) == (0, {"norm": -math.inf, "done": 1.0})


def test_a_text_under_the_name_of_a_number_gets_a_name_of_its_own(tmp_path: Path) -> None:
    tracker = started(InOneRepository(tmp_path))
    tracker.log({"loss": 0.5}, step=0)
    tracker.log({"loss": "diverged"}, step=1)
    tracker.finish()
    rows = read(InOneRepository.place, tracker.run_id("run"))
    assert rows == [(0, {"loss": 0.5}), (1, {"loss.text": "diverged"})]


def test_steps_logged_again_have_a_context(tmp_path: Path) -> None:
    tracker = started(InOneRepository(tmp_path))
    tracker.write([LoggedRecord(time=1.0, step=5, values={"loss": 1.0})])
    tracker.write([LoggedRecord(time=2.0, step=5, attempt=2, values={"loss": 2.0})])
    tracker.finish()
    run = reopened(tracker)
    assert sequence(run, "metric", "loss", {})[2] == [1.0]
    assert sequence(run, "metric", "loss", {"attempt": 2})[1:] == ([2.0], [2.0]), "with the record's time"


def test_bins_of_several_widths_become_bins_of_one(tmp_path: Path) -> None:
    tracker = started(InOneRepository(tmp_path))
    histogram = StoredMedium(kind="histogram", data={"edges": [0.0, 1.0, 4.0], "counts": [3, 5]})
    tracker.write([LoggedRecord(time=1.0, step=0, media={"weights": histogram})])
    tracker.finish()
    (found,) = sequence(reopened(tracker), "distributions", "weights", {})[2]
    assert (list(found.weights), list(found.range)) == ([3.0, 5.0], [0.0, 4.0])


@pytest.mark.parametrize("states", [("failed",), ("killed", "finished"), ("finished", "killed")])
def test_a_run_says_how_it_ended(tmp_path: Path, states: Sequence[RunState]) -> None:
    for step, state in enumerate(states):
        tracker = InOneRepository(tmp_path)
        tracker.start(f"ended {states}", {})
        tracker.log({"loss": 1.0, "loss.text": 2.0}, step=step)
        tracker.end(state)
    run = aim.Run(tracker.run_id(f"ended {states}"), repo=InOneRepository.place, read_only=True)
    assert (run["drivetrain"]["state"], run["drivetrain"]["step"]) == (states[-1], len(states) - 1)
