import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    NoCheckpointError,
    StateError,
    find_checkpoints,
    read_manifest,
)
from drivetrain_checkpoint.format.manifest import check_files, encode_plan
from drivetrain_state import Context


@pytest.fixture
def saved(tmp_path: Path, context: Context) -> Path:
    return save(
        Checkpointer(context, tmp_path),
        7,
        {"weight": torch.ones(3)},
        replicated={"optimizer": {"lr": 0.1}},
        per_rank={"rng": torch.get_rng_state()},
        plan={"precision": {"asked": "auto", "applied": "bf16"}},
    )


def test_it_says_what_was_saved_by_what(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.world_size, manifest.sequence) == (7, 1, 1)
    assert manifest.plan == {"precision": {"asked": "auto", "applied": "bf16"}}
    assert manifest.libraries["torch"] == torch.__version__.split("+")[0]
    assert set(manifest.files) == {file.name for file in saved.iterdir()} - {"manifest.json"}
    check_files(saved, manifest)


def test_every_changed_byte_of_it_is_noticed(saved: Path) -> None:
    path = saved / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        changed = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        if content[position : position + 1].isspace():
            continue  # what stands between the tokens is no part of what it says
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(saved)


def test_a_truncated_one_is_damaged_and_without_one_the_save_was_not_completed(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json is damaged"):
        read_manifest(saved)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is missing: this save was never"):
        read_manifest(saved)


def test_a_plan_holds_plain_values_only() -> None:
    with pytest.raises(StateError, match=r"^plan: 'x' is a tensor"):
        encode_plan({"x": torch.ones(1)})
    with pytest.raises(StateError, match=r"^plan\['f'\]: it is a "):
        encode_plan({"f": print})


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as a stranger may: with a checksum that fits."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    del content["checksum"]
    in_format_2 = content["format_version"] == 2
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=in_format_2).encode())
    path.write_text(json.dumps({**content, "checksum": checksum}))


def weight(content: dict[str, Any]) -> dict[str, Any]:
    return content["divisions"][content["tensors"]["weights-model"]["weight"]]


def file_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["files"]["weights-model.r0.safetensors"]


def in_format_2(content: dict[str, Any]) -> None:
    """Describe the tensors as format 2 did, with the place of each piece."""
    divisions = content.pop("divisions")
    for part, tensors in content["tensors"].items():
        end = content["files"].get(f"{part}.r0.safetensors", {}).get("size_bytes", 0)
        for name in reversed(tensors):
            one = divisions[tensors[name]]
            [[rank, offsets, sizes]] = one["pieces"]
            end -= prod(sizes) * one["item_bytes"]
            pieces = [[f"{part}.r{rank}.safetensors", end, offsets, sizes]]
            tensors[name] = {"dtype": one["dtype"], "shape": one["shape"], "pieces": pieces}
    content["format_version"] = 2


def old_weight(content: dict[str, Any]) -> dict[str, Any]:
    in_format_2(content)
    return content["tensors"]["weights-model"]["weight"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: weight(content).update(pieces=[]), "has pieces of 0 elements"),
        (lambda content: weight(content).update(shape=[2**40]), "has pieces of 3 elements"),
        (lambda content: weight(content)["pieces"].append(weight(content)["pieces"][0]), "pieces of 6 elements"),
        (lambda content: weight(content)["pieces"][0].__setitem__(0, 7), "r7.safetensors is missing or too short"),
        (lambda content: weight(content)["pieces"][0].__setitem__(0, "../x"), "is missing or too short"),
        (lambda content: weight(content)["pieces"][0].__setitem__(1, [1]), "has a piece at"),
        (lambda content: weight(content).update(item_bytes=8), "has elements of 8 bytes"),
        (lambda content: weight(content).update(dtype="F128", item_bytes=0), "has elements of 0 bytes"),
        (lambda content: content["tensors"]["weights-model"].update({str(i): 0 for i in range(99)}), "too short"),
        (lambda content: content["tensors"]["weights-model"].update(weight=99), "contradicts itself"),
        (lambda content: content["tensors"]["weights-model"].update(weight=-1), "contradicts itself"),
        (lambda content: old_weight(content).update(pieces=[]), "has pieces of 0 elements"),
        (lambda content: old_weight(content)["pieces"][0].__setitem__(1, 10**6), "is too short"),
        (lambda content: old_weight(content)["pieces"][0].__setitem__(1, -4), "is too short"),
        (lambda content: old_weight(content)["pieces"][0].__setitem__(0, "../other"), "is too short"),
        (lambda content: old_weight(content)["pieces"].append(
            [content["tensors"]["weights-model"]["weight"]["pieces"][0][0], 0, [0], [1]]), "lies in two places"),
        (lambda content: file_of(content).update(checksums=[]), "has 0 checksums for"),
        (lambda content: content.pop("world_size"), "world_size"),
        (lambda content: content.update(step="x"), "step is 'x'"),
        (lambda content: content.update(metrics={"$pickle": {}}), "metrics|pickle"),
        (lambda content: content.update(files=3), "contradicts itself"),
    ],
)  # fmt: skip
def test_one_that_contradicts_itself_is_passed_over(
    saved: Path, tmp_path: Path, context: Context, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    rewritten(saved, lambda _: None)
    assert read_manifest(saved).step == 7
    rewritten(saved, change)
    with pytest.raises(CorruptCheckpointError, match=why):
        read_manifest(saved)
    assert [one.is_valid for one in find_checkpoints(tmp_path)] == [False]
    with pytest.raises(NoCheckpointError, match="contradicts itself"):
        Checkpointer(context, tmp_path).load()


def test_the_order_of_the_tensors_is_a_part_of_what_the_checksum_covers(saved: Path) -> None:
    path = saved / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(sorted(content.items()))))
    with pytest.raises(CorruptCheckpointError, match="its checksum does not fit"):
        read_manifest(saved)


def test_one_of_format_2_is_read_with_the_places_it_names(tmp_path: Path, context: Context) -> None:
    state = {"a": torch.arange(5), "b": torch.ones(2, 3), "c": torch.tensor(2.5), "none": torch.ones(0)}
    checkpointer = Checkpointer(context, tmp_path)
    saved = save(checkpointer, 7, state, replicated={"x": state}, per_rank={"rng": state})
    rewritten(saved, in_format_2)
    manifest = read_manifest(saved)
    assert set(manifest.starts) == {name for name in manifest.files if name.endswith(".safetensors")}
    loaded = checkpointer.load()
    for found in (loaded.models["model"], loaded.replicated["x"], (loaded.per_rank or {})["rng"]):
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert save(checkpointer, 8, state).name == "step-8"
    assert [one.sequence for one in find_checkpoints(tmp_path)] == [2, 1]


def test_a_folder_in_its_place_is_none(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").mkdir()
    assert [one.is_valid for one in find_checkpoints(tmp_path)] == [False]


@pytest.mark.parametrize(
    ("nested", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "damaged: it is nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "damaged: it is nested too deeply"),
        ("[" * 800 + "]" * 800, "damaged"),
    ],
    ids=["lists", "mappings", "shallow"],
)
def test_one_that_is_nested_too_deeply_is_passed_over(
    saved: Path, tmp_path: Path, context: Context, nested: str, why: str
) -> None:
    newest = save(Checkpointer(context, tmp_path), 8)
    (newest / "manifest.json").write_text(nested)
    with pytest.raises(CorruptCheckpointError, match=why):
        read_manifest(newest)
    assert [one.is_valid for one in find_checkpoints(tmp_path)] == [True, False]
    assert Checkpointer(context, tmp_path).load().step == 7


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_one_that_is_no_file_or_too_large_is_refused_unread(
    saved: Path, tmp_path: Path, context: Context, kind: str
) -> None:
    newest = save(Checkpointer(context, tmp_path), 8)
    path = newest / "manifest.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**30 + 1)  # sparse: it takes no room
    why = "at most 1073741824 are read" if kind == "huge" else "no regular file"
    with pytest.raises(CorruptCheckpointError, match=rf"manifest\.json is no manifest: .*{why}"):
        read_manifest(newest)
    assert Checkpointer(context, tmp_path).load().step == 7
