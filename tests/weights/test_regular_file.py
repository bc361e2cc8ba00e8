import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_weights import MappedFile, WeightFilesError, open_weights, read_index, read_torch_file
from drivetrain_weights.regular_file import open_regular, parse_json, read_json


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))  # an absolute path may be too long for one


PLACED: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", MappedFile),
        ("model.bin", MappedFile),
        ("model.pt", read_torch_file),
        ("model.pt", lambda path: read_torch_file(path, mapped=True)),
        ("model.safetensors.index.json", read_index),
        ("config.json", read_json),
        ("model.safetensors", lambda path: open_weights(path.parent)),
        ("model.safetensors.index.json", lambda path: open_weights(path.parent)),
    ],
)
def test_what_is_no_regular_file_is_refused_by_every_reader_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, read: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    PLACED[kind](tmp_path / name)
    with pytest.raises(WeightFilesError, match=rf"{name} is no regular file but {kind}: name a file, or put"):
        read(tmp_path / name)


def test_a_pipe_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    os.mkfifo(tmp_path / "model-1.safetensors")
    with pytest.raises(WeightFilesError, match=r"model-1\.safetensors is no regular file but a named pipe"):
        open_weights(tmp_path)


def test_a_pipe_that_somebody_writes_into_is_refused_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")

    def write() -> None:
        with suppress(BrokenPipeError):  # whoever opened the pipe may have closed it before this writes
            (tmp_path / "x.json").write_text("{}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with pytest.raises(WeightFilesError, match=r"x\.json is no regular file but a named pipe"):
        read_json(tmp_path / "x.json")
    while writer.is_alive():  # it waits in `open` until somebody reads
        os.close(os.open(tmp_path / "x.json", os.O_RDONLY | os.O_NONBLOCK))
        writer.join(0.01)


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert torch.equal(open_weights(tmp_path)["a"].tensor("a"), torch.ones(2))
    with pytest.raises(FileNotFoundError, match="gone"):
        open_regular(tmp_path / "gone")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "x is nested too deeply to be read"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "x is nested too deeply to be read"),
        ("{", "x is no JSON: "),
        (b"\xff\x00\x01", "x is no JSON: "),
        ('{"a": 1, "a": 1}', "x has the key 'a' twice in one object"),
        ('{"a": 1, "\\u0061": 2}', "x has the key 'a' twice in one object"),
        ('[{"b": {"c": 1, "d": 2, "c": 3}}]', "x has the key 'c' twice in one object"),
    ],
)
def test_json_that_is_damaged_deep_or_says_a_thing_twice_is_refused(text: str | bytes, told: str) -> None:
    with pytest.raises(WeightFilesError, match=told):
        parse_json(text, where="x")


def test_one_key_in_two_objects_is_no_repeat() -> None:
    assert parse_json('[{"a": 1}, {"a": {"a": 2}}]', where="x") == [{"a": 1}, {"a": {"a": 2}}]
