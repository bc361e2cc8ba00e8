"""One medium of each kind, as a log keeps them beside itself."""

import wave
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain_tracking.records import StoredMedium


@pytest.fixture
def media(tmp_path: Path) -> Mapping[str, StoredMedium]:
    folder = tmp_path / "media"
    folder.mkdir()
    pillow = pytest.importorskip("PIL.Image")
    for name in ("image", "figure"):
        pillow.new("RGB", (4, 3), (250, 0, 0)).save(folder / f"{name}.png")
    pillow.new("RGB", (4, 3)).save(
        folder / "video.gif", save_all=True, append_images=[pillow.new("RGB", (4, 3), "red")]
    )
    with wave.open(str(folder / "audio.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(range(200)))
    (folder / "artifact.txt").write_text("an artifact")
    files = {
        kind: StoredMedium(kind=kind, path=folder / name, caption="a caption")
        for kind, name in (
            ("image", "image.png"),
            ("figure", "figure.png"),
            ("audio", "audio.wav"),
            ("video", "video.gif"),
            ("artifact", "artifact.txt"),
        )
    }
    return {
        **files,
        "table": StoredMedium(kind="table", data={"columns": ["name", "n"], "rows": [["a", 1], ["b", 2.5]]}),
        "histogram": StoredMedium(
            kind="histogram", data={"edges": [0.0, 1.0, 2.0, 3.0], "counts": [1, 4, 2]}
        ),
        "text": StoredMedium(kind="text", data="a text"),
    }
