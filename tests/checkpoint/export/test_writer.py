import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from drivetrain_checkpoint import (
    NoCheckpointError,
    StateError,
    open_export,
    plan_export,
    save_model,
    write_export,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of an export, as the library alone reads them by the index."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for name, file in weight_map.items():
        with safe_open(folder / file, framework="pt") as reader:
            assert reader.metadata()["format"] == "pt"
            found[name] = reader.get_tensor(name)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return bytes(one.reshape(-1).view(torch.uint8)) == bytes(other.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("max_shard_size", ["5GB", 40])
def test_every_dtype_and_shape_is_read_by_the_library(tmp_path: Path, max_shard_size: int | str) -> None:
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in DTYPES
        for shape in [(3, 5), (), (0, 4)]
    }
    plan = save_model(tensors, tmp_path, max_shard_size=max_shard_size)
    back = read(tmp_path)
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensor) for name, tensor in tensors.items())
    assert plan.is_sharded == (max_shard_size == 40)


def test_one_file_has_the_header_that_loaders_look_for(tmp_path: Path) -> None:
    save_model(nn.Linear(2, 1), tmp_path, metadata={"run": "7"})
    assert files(tmp_path) == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as reader:
        assert reader.metadata() == {"format": "pt", "run": "7"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(1)}
    save_model(tensors, tmp_path, max_shard_size="20B", metadata={"run": "7"})
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files(tmp_path) == [*shards, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 36},
        "weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]},
    }
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as reader:
            assert reader.metadata() == {"format": "pt", "run": "7"}


def test_strides_views_conjugates_and_gradients_do_not_matter(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "transposed": base.t(),
        "rows": base[1:],
        "sliced": base[:, 1::2],
        "expanded": base[:1].expand(5, 4),
        "complex": (number := torch.tensor([1 + 2j], dtype=torch.complex64)),
        "conjugate": number.conj(),
        "parameter": nn.Parameter(base.clone()),
    }
    save_model(tensors, tmp_path)
    back = read(tmp_path)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert back.keys() == tensors.keys()


@pytest.mark.parametrize("max_shard_size", ["5GB", 16])
def test_a_tied_tensor_is_stored_once_and_its_other_names_are_told(
    tmp_path: Path, max_shard_size: int | str
) -> None:
    weight = torch.ones(4)
    save_model({"a": weight, "b": torch.ones(4), "c": weight}, tmp_path, max_shard_size=max_shard_size)
    assert sorted(read(tmp_path)) == ["a", "b"]
    if max_shard_size == 16:
        about = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
        assert about == {"total_size": 32, "tied_weights": {"c": "a"}}
        return
    with safe_open(tmp_path / "model.safetensors", framework="pt") as reader:
        assert reader.metadata() == {"format": "pt", "tied_weights": '{"c": "a"}'}


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.empty(2, device="meta"), "'x' is on the meta device and has no data"),
        (torch.eye(2).to_sparse(), "'x' is a Tensor of torch.sparse_coo"),
        (
            torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.jagged),
            "'x' is a NestedTensor of torch.jagged",
        ),
        (torch.zeros(1, dtype=torch.complex128), "'x' is of torch.complex128"),
        ("text", "'x' is of type str"),
    ],
)
def test_what_cannot_be_stored_is_named_and_nothing_is_written(
    tmp_path: Path, tensor: object, said: str
) -> None:
    with pytest.raises(StateError, match=re.escape(said)):
        save_model({"a": torch.ones(1), "x": tensor}, tmp_path / "new")  # type: ignore[dict-item]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("metadata", [{"format": "tf"}, {"tied_weights": "{}"}, {"a": 1}, {1: "a"}])
def test_metadata_is_strings_under_free_keys(tmp_path: Path, metadata: dict) -> None:
    with pytest.raises(ValueError, match=r"metadata\[.*\] = .*: both must be strings, the key none of"):
        save_model({"a": torch.ones(1)}, tmp_path, metadata=metadata)
    assert files(tmp_path) == []


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file: name the folder"):
        save_model({}, tmp_path / "file")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (["a", "c"], "'c' comes where the plan has 'b'"),
        (["a", "a", "b", "c"], "'a' comes where the plan has 'b'"),
        (["a", "b"], "the tensors end where the plan has 'c'"),
        (["a", "b", "c", "d"], "'d' comes after the last tensor of the plan"),
    ],
)
def test_a_stream_is_the_plans_names_in_its_order(tmp_path: Path, order: list[str], said: str) -> None:
    plan = plan_export({name: torch.ones(2) for name in "abc"}, max_shard_size=8)
    with pytest.raises(ValueError, match=said):
        write_export(plan, ((name, torch.ones(2)) for name in order), tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, dtype=torch.float16)])
def test_a_stream_has_the_planned_shapes_and_dtypes(tmp_path: Path, tensor: Tensor) -> None:
    plan = plan_export({"a": torch.ones(2)})
    with pytest.raises(StateError, match=re.escape("planned was (2,) and torch.float32")):
        write_export(plan, [("a", tensor)], tmp_path)


def test_a_stream_may_have_the_tied_names_and_each_file_is_written_before_more_is_asked_for(
    tmp_path: Path,
) -> None:
    names = ["a", "tied", "b", "c"]
    plan = plan_export({name: torch.ones(2) for name in names}, ties={"tied": "a"}, max_shard_size=8)
    unfinished: list[list[str]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            unfinished.append(files(tmp_path))
            yield name, torch.ones(2)

    write_export(plan, stream(), tmp_path)
    assert [len(seen) for seen in unfinished] == [0, 1, 1, 2]
    assert sorted(read(tmp_path)) == ["a", "b", "c"]


SIZES = {"one": "5GB", "two": 8, "four": 4}


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_a_new_export_replaces_an_older_one_whole_and_leaves_other_files_alone(
    tmp_path: Path, old: str, new: str
) -> None:
    def tensors(value: float) -> dict[str, Tensor]:
        return {name: torch.full((1,), value) for name in "abcd"}

    others = {"config.json", "adapter-00001-of-00002.safetensors", "model.txt", "model-x.safetensors.tmp"}
    for name in others:
        (tmp_path / name).write_text("")
    (tmp_path / "model-00009-of-00009.safetensors.tmp").write_text("of a save that was killed")
    save_model(tensors(1.0), tmp_path, max_shard_size=SIZES[old])
    plan = save_model(tensors(2.0), tmp_path, max_shard_size=SIZES[new])
    expected = {*plan.files, *(["model.safetensors.index.json"] if plan.is_sharded else []), *others}
    assert set(files(tmp_path)) == expected
    assert all(torch.equal(value, torch.full((1,), 2.0)) for value in read(tmp_path).values())


class DiskFullError(Exception):
    pass


@pytest.mark.parametrize("old", SIZES)
def test_an_error_while_tensors_come_leaves_the_older_export_as_it_was(tmp_path: Path, old: str) -> None:
    tensors = {name: torch.full((1,), 1.0) for name in "abcd"}
    save_model(tensors, tmp_path, max_shard_size=SIZES[old])
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            yield name, torch.zeros(1)
        raise DiskFullError

    with pytest.raises(DiskFullError):
        write_export(plan_export(tensors, max_shard_size=4), stream(), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_killed_between_any_two_changes_a_folder_holds_the_old_or_the_new_or_none_and_a_save_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    changes = 0
    killed_at = -1

    def change(method: Callable[..., object]) -> Callable[..., object]:
        def change_or_die(*args: object, **kwargs: object) -> object:
            nonlocal changes
            if (changes := changes + 1) == killed_at:
                raise KilledError
            return method(*args, **kwargs)

        return change_or_die

    def save(value: float, size: int | str) -> None:
        save_model({name: torch.full((1,), value) for name in "abcd"}, tmp_path, max_shard_size=size)

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, change(getattr(Path, name)))
    found: set[float | None] = set()
    for point in range(1, 99):
        killed_at = -1
        save(1.0, SIZES[old])
        changes, killed_at = 0, point
        try:
            save(2.0, SIZES[new])
        except KilledError:
            try:
                values = {tensor.item() for tensor in open_export(tmp_path).values()}
            except NoCheckpointError:
                values = {None}
            assert len(values) == 1, f"a mixture at change {point}"
            found |= values
        else:
            break
    assert point > 1
    assert found <= ({1.0, 2.0, None} if old == new != "one" else {1.0, 2.0})
    assert not list(tmp_path.glob("*.tmp"))
    assert {tensor.item() for tensor in open_export(tmp_path).values()} == {2.0}


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
def test_files_may_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_model({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path, max_shard_size=4)
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in files(tmp_path)}
    assert len(modes) == 1
