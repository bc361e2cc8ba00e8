"""What the tests of platforms share: a network that ends at this machine, and one medium of each kind."""

import socket
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from drivetrain_tracking.values.records import StoredMedium


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse connections to other machines, which fails the test, and questions for their addresses.

    A question alone does not fail it: in threads of their own, libraries ask for updates (ClearML) or report errors
    (Comet) in their offline modes too.
    """
    refused: list[object] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
            refused.append(address)
            raise ConnectionRefusedError(f"a platform's library connects to {address}")
        connect(self, address)

    def look_up_here(host: str | None, *args: object, **options: object) -> object:
        if host not in (None, "localhost", "127.0.0.1", "::1"):
            raise socket.gaierror(f"a platform's library asks for the address of {host}")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    yield
    assert not refused, f"connections to other machines: {refused}"


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
        "text": StoredMedium(kind="text", data="<b>said</b>"),
    }
