from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.errors import TrackerStateError
from drivetrain_tracking.platforms.tensorboard import TensorBoardTracker
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, flat_values
from optional_modules import import_later
from tracking.platforms.platform_tests import QuietPlatformTests, started

np = import_later("numpy")
events = import_later("tensorboard.backend.event_processing.event_file_loader")


class TestTensorBoard(QuietPlatformTests):
    tracker = TensorBoardTracker
    libraries = (
        "tensorboard.summary.writer.event_file_writer",
        "tensorboard.backend.event_processing.event_file_loader",
    )

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return read(directory / "tensorboard")

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {
            name: value if isinstance(value, str) else float(np.float32(value))
            for name, value in flat_values(values).items()
        }

    def test_few_killed_writers_lose_and_double_nothing(self, tmp_path: Path) -> None:
        self.check_kills(tmp_path, 3)

    def killed_rows(self, directory: Path) -> Sequence[Any]:
        return read(directory / "tensorboard")

    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        found = accumulated(directory / "tensorboard" / "run")
        for kind in ("image", "figure"):
            (image,) = found.Images(kind)
            assert (image.width, image.height, image.step) == (4, 3, 7)
            assert image.encoded_image_string == media[kind].path.read_bytes()
        (audio,) = found.Audio("audio")
        assert audio.encoded_audio_string == media["audio"].path.read_bytes()
        assert (audio.sample_rate, audio.length_frames, audio.content_type) == (8000, 100, "audio/wav")
        (histogram,) = [one.histogram_value for one in found.Histograms("histogram")]
        assert (histogram.min, histogram.max, histogram.num) == (0.0, 3.0, 7.0)
        assert (list(histogram.bucket_limit), list(histogram.bucket)) == ([0.0, 1.0, 2.0, 3.0], [0, 1, 4, 2])
        assert found.Tensors("text")[0].tensor_proto.string_val[0] == b"<b>said</b>"
        table = found.Tensors("table")[0].tensor_proto.string_val[0].decode()
        assert table.splitlines() == ["| name | n |", "| --- | --- |", "| a | 1 |", "| b | 2.5 |"]

    def open_live(self, directory: Path) -> Any:
        return pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(directory))

    def check_live(self, directory: Path, live: Any) -> None:
        live.add_scalar("loss", 0.25, 2)
        live.close()
        assert read(directory) == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]


def read(folder: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the steps and values of all events by their times; those of the run itself have none."""
    found = []
    for file in sorted(folder.glob("**/events.*")):
        found += [
            (event.wall_time, event.step, {v.tag: _content(v) for v in event.summary.value})
            for event in events.EventFileLoader(str(file)).Load()
            if event.wall_time and event.summary.value
        ]
    return [(step, values) for _, step, values in sorted(found, key=lambda one: one[0])]


def _content(value: object) -> object:
    if value.metadata.plugin_data.plugin_name == "text":
        return value.tensor.string_val[0].decode()
    return float(value.tensor.float_val[0])  # the loader makes tensors of scalars


def accumulated(folder: Path) -> Any:
    """Return what TensorBoard itself reads of a run."""
    library = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = library.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_the_configuration_is_in_the_hparams_tab_and_the_plan_a_text(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.start("run", {"lr": 0.1, "model": {"width": 8, "bias": True, "act": "gelu"}, "limit": None})
    tracker.record_plan({"world_size": 2})
    tracker.finish()
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    found = accumulated(tmp_path / "tensorboard" / "run")
    content = found.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    session = metadata.parse_session_start_info_plugin_data(content)
    assert {name: getattr(one, one.WhichOneof("kind")) for name, one in session.hparams.items()} == {
        "lr": 0.1,
        "model.width": 8.0,
        "model.bias": True,
        "model.act": "gelu",
    }
    (plan,) = found.Tensors("plan")
    assert b'"world_size": 2' in plan.tensor_proto.string_val[0]


@pytest.mark.parametrize("library", ["torch.utils.tensorboard", "tensorboardX"])
def test_a_writer_of_the_users_gets_attempts_apart_and_says_what_it_holds(
    library: str, tmp_path: Path
) -> None:
    live = pytest.importorskip(library).SummaryWriter(str(tmp_path))
    with pytest.raises(AttributeError):
        TensorBoardTracker.of(object())
    tracker = TensorBoardTracker.of(live)
    tracker.start("run", {"lr": 0.1})
    tracker.write([LoggedRecord(time=1.5, step=1, values={"loss": 0.5})])
    tracker.write([LoggedRecord(time=2.5, step=1, attempt=2, values={"loss": 0.75})])
    assert tracker.count_held([LoggedRecord(time=1.5), LoggedRecord(time=9.0)]) == 1
    tracker.finish()
    live.add_scalar("loss", 0.25, 2)
    live.close()
    assert read(tmp_path) == [(1, {"loss": 0.5}), (1, {"loss": 0.75}), (2, {"loss": 0.25})]
    assert [one.value for one in accumulated(tmp_path).Scalars("loss")] == [0.5, 0.25]
    assert accumulated(tmp_path / "attempt-2").Scalars("loss")[0].wall_time == 2.5
    if live.file_writer is None:
        with pytest.raises(TrackerStateError, match="closed: make another"):
            TensorBoardTracker.of(live)


def test_a_run_that_was_not_finished_says_so_and_that_it_is_now(tmp_path: Path) -> None:
    for state in ("finished", "killed", None, "finished", "finished"):
        tracker = started(TensorBoardTracker(tmp_path))
        tracker.log({"loss": 1.0, "config": "of the user's"}, step=1)
        tracker.end(state)
    told = [values["state"] for _, values in read(tmp_path / "tensorboard") if "state" in values]
    assert told == ["killed", "finished"]
