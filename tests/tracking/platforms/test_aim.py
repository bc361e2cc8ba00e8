import math
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms import compat
from drivetrain_tracking.platforms.aim import AimTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.testing import PlatformContract
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from killed_trackers import kill_writers, numbered_rows

aim = pytest.importorskip("aim")
Context = pytest.importorskip("aim.storage.context").Context


class InOneRepository(AimTracker):
    """A tracker whose run is in a repository that all tests share: to make one takes two seconds."""

    place = ""

    def open(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._options = replace(self._options, repo=self._options.repo or self.place)
        super().open(run_name, config)


class Contract(PlatformContract):
    def make(self, directory: Path) -> AimTracker:
        return InOneRepository(directory)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        run_hash = AimTracker(directory).run_id("contract")
        return [] if run_hash is None else read(InOneRepository.place, run_hash)

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {k: v if isinstance(v, str) else float(v) for k, v in flat_values(values).items()}


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
    steps, (values, _, times) = get(name, Context(context)).data.items_list()
    return steps, times, values


@pytest.fixture(scope="module", autouse=True)
def shared_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    InOneRepository.place = str(tmp_path_factory.mktemp("aim"))
    aim.Repo.from_path(InOneRepository.place, init=True)
    return InOneRepository.place


def test_the_contract_of_platforms(tmp_path: Path) -> None:
    Contract().check_all(tmp_path)


def started(directory: Path, name: str = "run", **options: Any) -> AimTracker:
    tracker = InOneRepository(directory)
    tracker.start(name, {"lr": 0.1, "model": {"width": 8}}, **options)
    return tracker


def reopened(tracker: AimTracker, name: str = "run") -> Any:
    return aim.Run(tracker.run_id(name), repo=aim.Repo.from_path(InOneRepository.place), read_only=True)


def test_queries_find_a_finished_run_with_its_configuration_tags_and_plan(tmp_path: Path) -> None:
    tracker = started(tmp_path, experiment="trial", tags=("first", "short"))
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
    tracker = started(tmp_path)
    tracker.log({"loss": math.nan, "norm": -math.inf, "best": None, "done": True})
    tracker.finish()
    ((step, values),) = read(InOneRepository.place, tracker.run_id("run"))
    assert (step, values.keys(), values["norm"], values["done"]) == (
        0,
        {"loss", "norm", "done"},
        -math.inf,
        1.0,
    )
    assert math.isnan(values["loss"])


def test_a_text_under_the_name_of_a_number_gets_a_name_of_its_own(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log({"loss": 0.5}, step=0)
    tracker.log({"loss": "diverged"}, step=1)
    tracker.finish()
    assert read(InOneRepository.place, tracker.run_id("run")) == [
        (0, {"loss": 0.5}),
        (1, {"loss.text": "diverged"}),
    ]


def test_steps_logged_again_have_a_context(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.write([LoggedRecord(time=1.0, step=5, values={"loss": 1.0})])
    tracker.write([LoggedRecord(time=2.0, step=5, attempt=2, values={"loss": 2.0})])
    tracker.finish()
    run = reopened(tracker)
    assert sequence(run, "metric", "loss", {})[2] == [1.0]
    assert sequence(run, "metric", "loss", {"attempt": 2})[1:] == ([2.0], [2.0]), "with the record's time"


def test_media_come_back(tmp_path: Path, media: Mapping[str, StoredMedium]) -> None:
    tracker = started(tmp_path)
    kinds = {kind: medium for kind, medium in media.items() if kind in tracker.media_kinds}
    assert kinds.keys() == tracker.media_kinds
    tracker.write([LoggedRecord(time=1.0, step=7, media=kinds)])
    tracker.finish()
    run = reopened(tracker)
    for name in ("image", "figure"):
        ((image,),) = [sequence(run, "images", name, {})[2]]
        assert (image.to_pil_image().size, image.caption) == ((4, 3), "a caption")
    (audio,) = sequence(run, "audios", "audio", {})[2]
    assert bytes(audio.storage["data"]) == media["audio"].path.read_bytes()
    (text,) = sequence(run, "texts", "text", {})[2]
    assert text.data == "<b>said</b>"
    (histogram,) = sequence(run, "distributions", "histogram", {})[2]
    assert (list(histogram.weights), list(histogram.range)) == ([1, 4, 2], [0.0, 3.0])
    (artifact,) = run.artifacts.values()
    assert Path(artifact.download(str(tmp_path / "there"))).read_text() == "an artifact"


def test_bins_of_several_widths_become_bins_of_one(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    histogram = StoredMedium(kind="histogram", data={"edges": [0.0, 1.0, 4.0], "counts": [3, 5]})
    tracker.write([LoggedRecord(time=1.0, step=0, media={"weights": histogram})])
    tracker.finish()
    (found,) = sequence(reopened(tracker), "distributions", "weights", {})[2]
    assert (list(found.weights), list(found.range)) == ([3.0, 5.0], [0.0, 4.0])


def test_a_run_of_the_users_stays_open(tmp_path: Path) -> None:
    live = aim.Run(
        repo=InOneRepository.place,
        system_tracking_interval=None,
        capture_terminal_logs=False,
        experiment="mine",
    )
    tracker = AimTracker.of(live)
    tracker.start("run", {"lr": 0.1})
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    live.track(0.25, name="loss", step=2)
    assert live["hparams", "lr"] == 0.1
    assert live.get_metric("loss", Context({})).data.items_list()[1][0] == [0.5, 0.25]
    assert live.experiment == "mine"
    live.close()
    assert not list(tmp_path.iterdir())


def test_no_thread_stays_and_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    tracker = started(tmp_path)
    tracker.log({"loss": 1, "tokens": 2.5})
    tracker.log({"loss": 1.5, "tokens": 2})
    tracker.finish()
    assert threading.active_count() == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_kill_takes_nothing_and_doubles_nothing(
    rounds: int, tmp_path: Path, shared_repository: str
) -> None:
    shutil.copytree(Path(shared_repository) / ".aim", tmp_path / ".aim")
    count = 15 * (rounds + 1)
    kill_writers(AimTracker, ("forked_aim",), tmp_path, num_rounds=rounds, num_records=count)
    assert read(str(tmp_path), AimTracker(tmp_path).run_id("killed")) == numbered_rows(count)


@pytest.mark.parametrize("states", [("failed",), ("killed", "finished"), ("finished", "killed")])
def test_a_run_says_how_it_ended(tmp_path: Path, states: Sequence[RunState]) -> None:
    for step, state in enumerate(states):
        tracker = InOneRepository(tmp_path)
        tracker.start(f"ended {states}", {})
        tracker.log({"loss": 1.0, "loss.text": 2.0}, step=step)
        tracker.end(state)
    run = aim.Run(tracker.run_id(f"ended {states}"), repo=InOneRepository.place, read_only=True)
    assert (run["drivetrain"]["state"], run["drivetrain"]["step"]) == (states[-1], len(states) - 1)
