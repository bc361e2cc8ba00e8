import wave
from pathlib import Path

import pytest

from drivetrain_tracking import (
    Artifact,
    Audio,
    Figure,
    Histogram,
    Image,
    JSONLTracker,
    Table,
    Text,
    TrackerGroup,
    ValueNotLoggableError,
    Video,
)
from drivetrain_tracking.forwarding.forwarder import logged_record
from drivetrain_tracking.spool.spool_reader import SpoolReader
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, StoredMedium
from optional_modules import import_later

np = import_later("numpy")
torch = import_later("torch")
PillowImage = import_later("PIL.Image")


def logged(folder: Path, values: dict[str, object]) -> LoggedRecord:
    """Log values as a run does, and read them back as a forwarder does."""
    trackers = TrackerGroup([JSONLTracker(folder)])
    trackers.start("media")
    trackers.log(values, step=3)
    trackers.finish()
    lines = [line for _, line in SpoolReader(folder / "log.jsonl").read() if "event" not in line]
    return logged_record(lines[-1], folder)


def medium(folder: Path, value: object) -> StoredMedium:
    return logged(folder, {"loss": 0.5, "it": value}).media["it"]


def test_media_stand_beside_the_values_of_their_record(tmp_path: Path) -> None:
    record = logged(tmp_path, {"loss": 0.5, "val/sample": Text("hello", caption="greeting")})
    assert (record.step, dict(record.values)) == (3, {"loss": 0.5})
    assert record.media == {"val/sample": StoredMedium(kind="text", data="hello", caption="greeting")}


@pytest.mark.parametrize(
    "picture",
    [
        Image(np.full((2, 3, 3), 255, np.uint8)),
        Image(torch.ones(3, 2, 3), channels_first=True),
        Image(torch.ones(2, 3, 3, dtype=torch.bfloat16)),
        Image(PillowImage.new("RGB", (3, 2), "white")),
        Image([[1.0, 1.0, 1.0], [1.0, float("inf"), 1.0]]),
    ],
)
def test_an_image_is_a_file(tmp_path: Path, picture: Image) -> None:
    stored = medium(tmp_path, picture)
    assert (stored.kind, stored.path.parent) == ("image", tmp_path / "media")
    with PillowImage.open(stored.path) as read:
        assert read.size == (3, 2)
        assert read.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_files_of_the_users_are_copied(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"video")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.txt").write_text("a")
    record = logged(
        tmp_path,
        {
            "clip": Video(tmp_path / "clip.mp4"),
            "file": Artifact(tmp_path / "clip.mp4"),
            "folder": Artifact(tmp_path / "weights"),
        },
    )
    assert record.media["clip"].path.read_bytes() == record.media["file"].path.read_bytes() == b"video"
    assert record.media["clip"].path.suffix == ".mp4"
    assert record.media["folder"].path.suffix == ".zip"


def test_frames_are_an_animation(tmp_path: Path) -> None:
    frames = np.zeros((4, 8, 8, 1), np.uint8)
    frames[1:] = np.arange(3, dtype=np.uint8)[:, None, None, None] * 90 + 60
    with PillowImage.open(medium(tmp_path, Video(frames, frames_per_second=5)).path) as read:
        assert (read.n_frames, read.info["duration"]) == (4, 200)


def test_samples_are_a_sound(tmp_path: Path) -> None:
    with wave.open(str(medium(tmp_path, Audio(torch.tensor([0.0, 1.0, -1.0, 2.0]), 8000)).path)) as read:
        assert (read.getnframes(), read.getframerate(), read.getnchannels()) == (4, 8000, 1)
        assert np.frombuffer(read.readframes(4), "<i2").tolist() == [0, 32767, -32767, 32767]


def test_a_figure_is_a_picture(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    with PillowImage.open(medium(tmp_path, Figure(figure)).path) as read:
        assert read.size == (100, 50)


def test_tables_and_histograms_stand_in_the_log(tmp_path: Path) -> None:
    assert medium(tmp_path, Table(["word", "n"], [["a", 1], ["b", torch.tensor(2)]])).data == {
        "columns": ["word", "n"],
        "rows": [["a", 1], ["b", 2]],
    }
    stored = medium(tmp_path, Histogram(torch.tensor([0.0, 1.0, 1.0, 4.0, float("nan")]), num_bins=4)).data
    assert stored == {"edges": [0.0, 1.0, 2.0, 3.0, 4.0], "counts": [1, 2, 0, 1], "num_nonfinite": 1}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Image(np.zeros((3, 8, 8))), "pass channels_first=True"),
        (Image(np.zeros(8)), r"shape \(8,\): allowed are \(height, width\)"),
        (Image("nowhere.png"), "there is no such file"),
        (Image(object()), "holds no numbers"),
        (Video(np.zeros((8, 8, 3))), "frames have the shape"),
        (Video(np.zeros((1, 8, 8, 3)), frames_per_second=0), "must be above 0"),
        (Audio(np.zeros(8)), "say the samples per second"),
        (Audio(np.zeros((2, 2, 2)), 8000), "samples have the shape"),
        (Figure(3), "it has no savefig"),
        (Table(["a"], [[1, 2]]), "row 0 has 2 values for 1 columns"),
        (Histogram([1.0], num_bins=0), "must be at least 1"),
        (Text(3), "pass a string"),
        (Artifact("nowhere"), "there is no such file or folder"),
        ({"nested": Text("x")}, "by a name of its own, not within a dict"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, value: object, told: str) -> None:
    with pytest.raises(ValueNotLoggableError, match=told):
        medium(tmp_path, value)


def test_every_kind_can_be_kept() -> None:
    assert JSONLTracker.media_kinds == ALL_MEDIA
