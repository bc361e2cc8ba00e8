"""How saves, loads and plans grow: processor time by number of parameters, a plan by number of tensors.

    uv run --group bench python benchmarks/growth.py [--parameters 5000 20000] [--tensors 25000 100000] [--ranks 64]

The model has many small layers, in AdamW: four tensors for each parameter. The plan of a save is all that it asks of
rank 0 for sharded tensors: to tell its holdings, join those of all ranks, plan, lay out its file and write the
manifest. The plan of a load is to read the manifest and to find what a rank of half as many ranks reads. Each
measurement has a process of its own. Seconds are of the processor: a busy machine shows more of them.
"""

import argparse
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rounds import RESULTS, Table, report
from torch import nn

from drivetrain import Accelerator
from drivetrain_checkpoint.format.checksummed_io import FileRecord
from drivetrain_checkpoint.format.layout import tensor_file
from drivetrain_checkpoint.format.manifest import Manifest, commit_manifest, read_manifest
from drivetrain_checkpoint.format.shards import TensorShard
from drivetrain_checkpoint.planning.file_list import TensorFiles
from drivetrain_checkpoint.planning.holdings import Holdings, RankHoldings, joined
from drivetrain_checkpoint.planning.read_plan import plan_reads
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, TensorName, plan_writes
from drivetrain_weights.tensor_box import Box

PART = "weights-model"


def save_and_load(num_parameters: int) -> Mapping[str, float]:
    """Processor seconds of a save and a load of a model of many small layers, in AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=Path(folder), sections={"run": {"show_plan": False}})
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_parameters // 2)))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=True))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        begun = time.process_time()
        accelerator.save_state()
        saved = time.process_time()
        accelerator.load_state()
        return {"save": saved - begun, "load": time.process_time() - saved}


def holdings(num_tensors: int, rank: int, num_ranks: int) -> Holdings:
    """What a rank holds: two rows of each tensor."""
    held = AvailableBoxes("F32", 4, (2 * num_ranks, 8), (Box((2 * rank, 0), (2, 8)),))
    return Holdings(shared={TensorName(PART, f"layers.{i}.weight"): held for i in range(num_tensors)})


def plans(num_tensors: int, num_ranks: int) -> Mapping[str, float]:
    """Processor seconds of the plan of a save and of a load of sharded tensors, and the further bytes of both."""
    main = holdings(num_tensors, 0, num_ranks)
    names = main.main_names()
    told = [pickle.dumps(holdings(num_tensors, rank, num_ranks).told(names)) for rank in range(num_ranks)]
    before, begun = _peak_bytes(), time.process_time()
    main.digest()
    main.told(main.main_names())
    ranks: list[RankHoldings] = [pickle.loads(one) for one in told]
    divisions = plan_writes(*joined(names, ranks))
    [file] = TensorFiles(divisions).files_of(0)
    size_bytes = file.layout.size_bytes
    with tempfile.TemporaryDirectory() as folder:
        commit_manifest(Path(folder), _manifest(divisions, size_bytes, num_ranks))
        planned = time.process_time()
        manifest_bytes = (Path(folder) / "manifest.json").stat().st_size
        manifest = read_manifest(Path(folder))
        box, memory = Box((0, 0), (4, 8)), torch.empty(4, 8)
        wanted = {name: [TensorShard(box, memory)] for name in manifest.tensors[PART]}
        num_reads = sum(len(reads) for _, reads in plan_reads(manifest, PART, wanted))
    assert num_reads == 2 * num_tensors
    return {
        "save": planned - begun,
        "load": time.process_time() - planned,
        "memory": _peak_bytes() - before,
        "manifest": manifest_bytes,
    }


def _manifest(divisions: Any, size_bytes: int, num_ranks: int) -> Manifest:
    names = [tensor_file(PART, rank, 0) for rank in range(num_ranks)]
    checksums = ("0" * 16,) * -(-size_bytes // 2**24)
    return Manifest(
        step=1, sequence=1, save_id="", saved_at="", world_size=num_ranks, mesh={}, attempt=0, models=("model",),
        files={name: FileRecord(name=name, size_bytes=size_bytes, checksums=checksums) for name in names},
        tensors=divisions, libraries={}, plan=None, metrics={},
    )  # fmt: skip


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tables(asked: argparse.Namespace) -> list[Table]:
    """Measure every size in each round, and return what grew."""
    sizes = {"parameters": asked.parameters, "tensors": asked.tensors}
    measured: dict[tuple[str, int], list[Mapping[str, float]]] = {
        (kind, size): [] for kind, found in sizes.items() for size in found
    }
    for number in range(asked.rounds):
        for (kind, size), found in measured.items():
            command = [sys.executable, __file__, "--measure", kind, str(size), "--ranks", str(asked.ranks)]
            found.append(
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])
            )
            print(f"round {number}: {size} {kind}: {found[-1]}", file=sys.stderr, flush=True)

    def table(title: str, unit: str, kind: str, key: str) -> Table:
        shown = {f"{size:,} {kind}": [one[key] for one in measured[kind, size]] for size in sizes[kind]}
        return Table(title=title, unit=unit, measured=shown)

    ranks = f"sharded over {asked.ranks} ranks"
    return [
        table("save_state, seconds of the processor", "s", "parameters", "save"),
        table("load_state, seconds of the processor", "s", "parameters", "load"),
        table(f"The plan of a save of tensors {ranks}, on rank 0", "s", "tensors", "save"),
        table(f"The plan of a load of them at {asked.ranks // 2} ranks", "s", "tensors", "load"),
        table("The further memory of both", "MB", "tensors", "memory"),
        table("The manifest", "MB", "tensors", "manifest"),
    ]


def main() -> None:
    """Measure one size, or all of them each in its own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, nargs="*", default=[5000, 20_000])
    parser.add_argument("--tensors", type=int, nargs="*", default=[25_000, 100_000])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure is not None:
        kind, size = asked.measure[0], int(asked.measure[1])
        print(json.dumps(save_and_load(size) if kind == "parameters" else plans(size, asked.ranks)))
        return
    report("growth", tables(asked), asked)


if __name__ == "__main__":
    main()
