import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import RunRanks
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model

ROWS = 3000  # of 2048 floats: three pieces


def build(rows: int = ROWS) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2048, rows), nn.BatchNorm1d(3), nn.Linear(3, 3))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Tensor]:
    values = {
        name: torch.rand_like(value.float()).to(value.dtype) for name, value in build().state_dict().items()
    }
    save_file(values, tmp_path / "model.safetensors")
    return values


def load(
    folders: list[str], maps: list[dict[str, str]], rows: list[int], cut_at: int | None
) -> dict[str, object]:
    """Load as rank 0 reads; what this rank found."""
    rank = dist.get_rank()
    with init_empty_weights():
        model = build(rows[rank])
    told: list[tuple[int, int]] = []

    def progress(*both: int) -> None:
        told.append(both)
        if cut_at == -1 and rank == 1:
            raise KeyError("of the user")
        if rank == 0 and len(told) == cut_at:
            os.truncate(Path(folders[0]) / "model.safetensors", 1000)

    try:
        report = load_checkpoint_in_model(
            model, folders[rank], maps[rank], dtype=torch.bfloat16, read_by="rank 0", progress=progress
        )
    except (RuntimeError, ValueError) as error:
        assert all(parameter.is_meta for parameter in model.parameters())
        return {"error": f"{type(error).__name__}: {error}"}
    return {"values": model.state_dict(), "mapped": sorted(report.mapped), "told": told}


CPU = {"": "cpu"}


def test_all_ranks_get_what_rank_0_reads(run_ranks: RunRanks, tmp_path: Path, values) -> None:
    """Rank 1 has no files, and nothing on disk."""
    both = run_ranks(load, [str(tmp_path), "/nowhere"], [{"": "cpu", "2": "disk"}, CPU], [ROWS, ROWS], None)
    for found, mapped in zip(both, (["2.bias", "2.weight"], []), strict=True):
        assert found["mapped"] == mapped
        for name, value in values.items():
            wanted = value if name in mapped or not value.is_floating_point() else value.bfloat16()
            assert torch.equal(found["values"][name], wanted)
    assert both[0]["told"] == both[1]["told"]
    assert (
        len(both[0]["told"]) == 3 + 8
    )  # the large one's pieces, and the others; rank 1 takes what rank 0 leaves on disk
    all_bytes = sum(value.nbytes for value in values.values())
    assert both[0]["told"][-1] == (all_bytes, all_bytes)


FAILURES = {
    # What rank 0, then rank 1 says.
    "rank 0 has another model": (
        {"rows": [7, ROWS]},
        "WeightsMismatchError: .*'0.weight' is \\(3000, 2048\\) float32, in the model \\(7, 2048\\)",
        "LoadError: rank 0 could not load, and so no rank did; the model is as it was. WeightsMismatchError: ",
    ),
    "rank 1 has another model": (
        {"rows": [ROWS, 7]},
        "LoadError: rank 1 could not load, and so no rank did; the model is as it was. WeightsMismatchError: ",
        "WeightsMismatchError: .*'0.weight' is \\(3000, 2048\\) float32, in the model \\(7, 2048\\)",
    ),
    "rank 1 has other files": (
        {"other": True, "maps": [{"": "cpu"}, {"": "cpu", "0": "disk"}]},
        "LoadError: rank 1 could not load",
        ".*is not on this rank what it is on rank 0: copy it here again",
    ),
    "a file is cut meanwhile": (
        {"cut_at": 1},
        ".*was cut while it was read",
        "LoadError: rank 0 could not read on",
    ),
    "the progress of rank 1 fails": (
        {"cut_at": -1},
        "LoadError: rank 1 could not load, and so no rank did",
        "LoadError: progress failed; the model is as it was$",
    ),
    "files are missing": (
        {"gone": True},
        "NoWeightsError: ",
        "LoadError: rank 0 could not load, and so no rank did",
    ),
}


@pytest.mark.parametrize(("how", "first", "second"), FAILURES.values(), ids=FAILURES)
def test_what_one_rank_cannot_load_none_does(
    run_ranks: RunRanks, tmp_path: Path, values, how: dict[str, Any], first: str, second: str
) -> None:
    folders = [tmp_path, tmp_path / "other" if "other" in how else tmp_path]
    (tmp_path / "other").mkdir()
    save_file({"0.weight": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    if "gone" in how:
        (tmp_path / "model.safetensors").unlink()
    both = run_ranks(
        load,
        list(map(str, folders)),
        how.get("maps", [CPU, CPU]),
        how.get("rows", [ROWS, ROWS]),
        how.get("cut_at"),
    )
    for found, told in zip(both, (first, second), strict=True):
        assert re.match(told, found["error"], re.S), found["error"]


def test_a_rank_that_has_the_same_in_other_files_gets_each_tensor_under_its_name(
    run_ranks: RunRanks, tmp_path: Path, values
) -> None:
    """Rank 1 opens its own files for the disk, where tensors of one size stand in another order."""
    other = tmp_path / "other"
    other.mkdir()
    names = sorted(values, reverse=True)
    places = {name: f"{number}.safetensors" for number, name in enumerate(names)}
    for name, file in places.items():
        save_file({name: values[name]}, other / file)
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    both = run_ranks(load, [str(tmp_path), str(other)], [CPU, {"": "cpu", "2": "disk"}], [ROWS, ROWS], None)
    assert [found["mapped"] for found in both] == [[], ["2.bias", "2.weight"]]
    for found in both:
        for name, value in values.items():
            wanted = value if name in found["mapped"] or not value.is_floating_point() else value.bfloat16()
            assert torch.equal(found["values"][name], wanted), name


def load_mixture(folder: str, maps: list[dict[str, str]], offload: str) -> dict[str, Tensor]:
    """Load a mixture of experts that the file holds expert by expert; what this rank has of it."""
    import transformers

    with init_empty_weights():
        model = transformers.MixtralForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    load_checkpoint_in_model(
        model, folder, maps[dist.get_rank()], dtype=torch.bfloat16, read_by="rank 0", offload_folder=offload
    )
    return {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_what_one_rank_writes_for_the_disk_another_reads_into_memory(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    wanted = transformers.MixtralForCausalLM(config)
    wanted.save_pretrained(tmp_path)
    for found in run_ranks(load_mixture, str(tmp_path), [{"": "disk"}, CPU], str(tmp_path / "offload")):
        for name, value in wanted.to(torch.bfloat16).state_dict().items():
            assert torch.equal(found[name], value), name
