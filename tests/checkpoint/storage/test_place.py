import sys
from pathlib import Path

import pytest
import torch

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    FolderNotSharedError,
    OtherRankFailedError,
    find_checkpoints,
    open_export,
    save_model,
)
from drivetrain_checkpoint.storage.place import locate, storage_of
from drivetrain_state import Context, connect


@pytest.mark.parametrize("url", ["file://{}", "local://{}"])
def test_a_url_of_the_disk_is_a_path(tmp_path: Path, url: str) -> None:
    assert locate(url.format(tmp_path)) == tmp_path


def test_text_may_begin_with_the_home_folder() -> None:
    assert locate("~/runs") == Path.home() / "runs"


def test_a_url_that_went_through_a_path_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^'s3:/bucket/run': a Path drops a slash of a URL; pass the URL as a str"
    ):
        locate(Path("s3://bucket/run"))


@pytest.mark.parametrize("use", [lambda url: save_model(torch.nn.Linear(1, 1), url), open_export])
def test_exports_go_to_folders_alone(use) -> None:
    with pytest.raises(
        ValueError, match=r"^'s3://bucket/export': must be a folder; copy from or to the store"
    ):
        use("s3://bucket/export")


def test_without_the_extra_a_url_asks_for_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ImportError, match=r"^memory://run: .* pip install 'drivetrain-checkpoint\[remote\]'"):
        locate("memory://run")


class TestRemote:
    @pytest.fixture(autouse=True)
    def _extra(self) -> None:
        pytest.importorskip("upath")

    def test_a_protocol_names_the_package_it_needs_or_that_nobody_knows_it(self) -> None:
        with pytest.raises(ImportError, match=r"^oci://bucket: Install ocifs"):
            locate("oci://bucket")
        with pytest.raises(ValueError, match=r"^s4://bucket: Protocol not known: s4"):
            locate("s4://bucket")

    def test_one_place_may_be_written_in_two_ways(self, tmp_path: Path) -> None:
        from upath import UPath

        assert locate("memory://runs/a/") == locate("memory://runs/a")
        assert locate(UPath(f"file://{tmp_path}")) == tmp_path

    def test_an_upload_that_is_given_up_is_not_there_afterwards(self) -> None:
        place = locate("memory://given-up/file")
        writer = storage_of(place).create(place)
        writer.write(memoryview(b"torn"))
        writer.close()
        assert storage_of(place).sizes_in(place.parent) == {}

    def test_checkpoints_are_kept_in_any_store(self, context: Context) -> None:
        checkpointer = Checkpointer(context, "memory://kept/run")
        for step in (1, 2):
            path = save(checkpointer, step, {"w": torch.ones(3) * step})
        assert str(path) == "memory://kept/run/step-2"
        assert torch.equal(checkpointer.load().models["model"]["w"], torch.ones(3) * 2)
        assert checkpointer.load("memory://kept/run/step-1").step == 1
        assert checkpointer.latest() == path
        assert [one.folder.name for one in find_checkpoints(checkpointer.directory)] == ["step-2", "step-1"]


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_disk_and_a_store_do_the_same(tmp_path: Path, kind: str) -> None:
    if kind == "store":
        pytest.importorskip("upath")
    directory = locate(tmp_path / "runs" if kind == "disk" else f"memory://{tmp_path.name}/runs")
    storage, folder = storage_of(directory), directory / "step-1"
    assert (storage.folders_in(directory), storage.sizes_in(folder)) == ([], {})
    assert not storage.is_folder(folder)
    storage.make_folder(folder)
    assert storage.sees(folder)
    with pytest.raises(FileNotFoundError):
        storage.read_whole(folder / "small")
    storage.put(folder / "small", b"12")
    storage.put(folder / "small", b"345")
    writer = storage.create(folder / "large")
    for piece in (b"01234", b"56789"):
        writer.write(memoryview(piece))
    writer.finish()
    writer.close()
    assert storage.folders_in(directory) == ["step-1"]
    assert storage.sizes_in(folder) == {"small": 3, "large": 10}
    assert storage.is_folder(folder)
    assert storage.read_whole(folder / "small") == b"345"
    with pytest.raises(ValueError, match=r"more than|at most"):
        storage.read_whole(folder / "large", most_bytes=9)
    reader = storage.open_to_read(folder / "large")
    first, second = bytearray(3), bytearray(9)
    assert reader.read_at(2, [memoryview(first), memoryview(second)]) == 8
    assert (bytes(first), bytes(second[:5])) == (b"234", b"56789")
    reader.close()
    storage.remove([folder / "small", folder / "large"])
    storage.remove_folder(folder)
    assert (storage.folders_in(directory), storage.sizes_in(folder)) == ([], {})


def save_into_memory_of_its_own() -> tuple[str, list[str]]:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, "memory://own/run")
        try:
            save(checkpointer, 1, {"w": torch.ones(3)}, per_rank={"rng": 1})
        except (FolderNotSharedError, OtherRankFailedError) as error:
            return str(error), [path.name for path in checkpointer.directory.glob("*/manifest.json")]
        raise AssertionError("it was saved")


def test_a_store_that_ranks_do_not_share_is_found_before_the_commit(run_ranks) -> None:
    pytest.importorskip("upath")
    for told, manifests in run_ranks(save_into_memory_of_its_own):
        assert "does not see in memory://own/run/step-1 what was written there, rank-1.json for one" in told
        assert manifests == []
