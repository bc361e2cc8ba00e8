"""One small medium of each kind, as the log stores them."""

import struct
import wave
import zlib
from pathlib import Path

from drivetrain_tracking.records import StoredMedium


def sample_media(folder: Path) -> dict[str, StoredMedium]:
    """Return a medium of each kind by the kind's name, with their files in `folder`."""
    image, sound, video, other = (folder / f"sample.{kind}" for kind in ("png", "wav", "mp4", "bin"))
    image.write_bytes(_png(4, 3))
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    video.write_bytes(b"\0\0\0\x18ftypisom")
    other.write_bytes(b"weights")
    return {
        "image": StoredMedium(kind="image", path=image, caption="a picture"),
        "figure": StoredMedium(kind="figure", path=image),
        "audio": StoredMedium(kind="audio", path=sound),
        "video": StoredMedium(kind="video", path=video),
        "table": StoredMedium(kind="table", data={"columns": ["a", "b"], "rows": [[1, "x"], [2.5, None]]}),
        "histogram": StoredMedium(kind="histogram", data={"edges": [0.0, 0.5, 1.0], "counts": [1, 2]}),
        "text": StoredMedium(kind="text", data="<b>said</b>"),
        "artifact": StoredMedium(kind="artifact", path=other),
    }


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes([200, 50, 50]) * width for _ in range(height))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
