from pathlib import Path

import pytest
import torch

from checkpoint.saves import flip, save
from drivetrain_checkpoint import Checkpointer, CorruptCheckpointError, verify_checkpoint
from drivetrain_checkpoint.format.checksummed_io import BLOCK_BYTES
from drivetrain_checkpoint.storage.place import storage_of
from drivetrain_state import Context

FILE = "weights-model.r0.safetensors"


@pytest.fixture
def folder(tmp_path: Path, context: Context) -> Path:
    """A checkpoint with a file of two blocks and a half."""
    weight = torch.arange(BLOCK_BYTES * 5 // 2, dtype=torch.uint8)
    return save(Checkpointer(context, tmp_path), 1, {"weight": weight}, replicated={"x": 1})


def found(folder: Path) -> list[tuple[str, int, int, str]]:
    return [(damage.file.name, damage.start, damage.stop, damage.why) for damage in verify_checkpoint(folder)]


def test_a_good_one_is_read_whole(folder: Path) -> None:
    counted: list[int] = []
    assert verify_checkpoint(folder, on_bytes=counted.append) == ()
    (folder / "manifest.json").unlink()
    assert sum(counted) == sum(path.stat().st_size for path in folder.iterdir())


def test_every_damaged_block_of_every_file_is_told(folder: Path) -> None:
    size = (folder / FILE).stat().st_size
    flip(folder / FILE, 5)
    flip(folder / FILE, -1)
    flip(folder / "state.json", 0)
    why = "the checksum differs from the manifest's"
    assert found(folder) == [
        (FILE, 0, BLOCK_BYTES, why),
        (FILE, 2 * BLOCK_BYTES, size, why),
        ("state.json", 0, (folder / "state.json").stat().st_size, why),
    ]


def test_a_torn_file_is_bad_from_the_block_it_ends_in(folder: Path) -> None:
    size = (folder / FILE).stat().st_size
    with (folder / FILE).open("r+b") as file:
        file.truncate(BLOCK_BYTES + 1)
    why = f"the file ends at byte {BLOCK_BYTES + 1}, and had {size}"
    assert found(folder) == [
        (FILE, BLOCK_BYTES, 2 * BLOCK_BYTES, why),
        (FILE, 2 * BLOCK_BYTES, size, why),
    ]


def test_a_missing_file_and_one_that_grew_are_told(folder: Path) -> None:
    size = (folder / FILE).stat().st_size
    (folder / FILE).unlink()
    state = (folder / "state.json").stat().st_size
    with (folder / "state.json").open("a") as file:
        file.write("more")
    assert found(folder) == [
        (FILE, 0, size, "the file is missing"),
        ("state.json", state, state + 4, "more than was written"),
    ]


def test_a_directory_in_a_files_place_cannot_be_read(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()
    assert [(name, why) for name, _, _, why in found(folder)] == [("state.json", "the file is missing")]


def test_without_a_good_manifest_nothing_can_be_verified(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json is damaged"):
        verify_checkpoint(folder)


def test_one_in_a_store_is_read_too(context: Context) -> None:
    pytest.importorskip("upath")
    weight = torch.arange(3 * BLOCK_BYTES, dtype=torch.uint8)
    place = save(Checkpointer(context, "memory://verify/run"), 1, {"weight": weight})
    assert verify_checkpoint("memory://verify/run/step-1") == ()
    content = bytearray(storage_of(place).read_whole(place / FILE))
    content[BLOCK_BYTES] ^= 1
    storage_of(place).put(place / FILE, bytes(content))
    [damage] = verify_checkpoint(place)
    assert str(damage) == (
        f"memory://verify/run/step-1/{FILE}: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}: "
        "the checksum differs from the manifest's"
    )
