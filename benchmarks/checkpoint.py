"""Saving and loading 1.8 GB of model and AdamW state: time, how long training is held, memory.

    uv run --group bench python benchmarks/checkpoint.py

One and two ranks (DDP, on the CPU over gloo). Each contestant saves the state of the same kind of run: drivetrain at
once and in the background, with copies made before training goes on or while it does ("overlap"), Accelerate, torch's
DCP at once and in the background; a raw write puts the same bytes
into one file a rank and forces it to the disk. Each writes beside what it wrote last, and then deletes that.
Contestants take turns; a file's pages are dropped from the cache before a cold load, and before a raw read.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_files import Raw, Turn, barrier, evict, num_ranks, rank, timed
from rounds import RESULTS, Table, installed, report, take_turns
from torch import Tensor, nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain_memory import record_peak

WIDTH, LAYERS = 2048, 36  # 151 million parameters: 604 MB, with AdamW 1.8 GB
STEP_WIDTH, STEP_ITEMS = 256, 256  # of the training that goes on meanwhile
CPU = torch.device("cpu")
HELD_ITEMS = 64  # of the micro-batch between an overlapped save and the next step


class Run:
    """A library's run: a model and an optimizer that has stepped, and a folder for its checkpoints.

    Args:
        library: Which.
        folder: For its checkpoints.
        like: A run of which the tensors are used again, for the sake of memory.
        staging: When drivetrain's saves in the background copy.
        layers: Of the model, of 16.8 MB each; with AdamW three times as much.
        width: Of a layer.
        device: Where the tensors are.
    """

    def __init__(
        self,
        library: str,
        folder: Path,
        *,
        like: "Run | None" = None,
        staging: str = "copy",
        layers: int = LAYERS,
        width: int = WIDTH,
        device: torch.device = CPU,
    ) -> None:
        torch.manual_seed(0)
        if library == "accelerate":
            from accelerate import Accelerator as Peer

            self.accelerator: Any = Peer(cpu=device == CPU)
        else:
            self.accelerator = Accelerator(
                cpu=device == CPU,
                project_dir=folder,
                sections={"checkpoint": {"keep_last": 1, "staging": staging}, "run": {"show_plan": False}},
            )
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False, fused=device != CPU)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # torch's own: what is trained does not matter here
        optimizer.zero_grad()
        self.parameters, self.state = list(model.parameters()), optimizer.state
        for own, other in zip(self.parameters, like.parameters if like else (), strict=like is not None):
            own.data = other.data
            self.state[own].update(like.state[other])
        self.folder = folder

    def tensors(self) -> list[Tensor]:
        """What a checkpoint of it holds, the small things left out."""
        return [*map(Tensor.detach, self.parameters)] + [
            self.state[parameter][key] for parameter in self.parameters for key in ("exp_avg", "exp_avg_sq")
        ]


def dcp_state(run: Run) -> dict[str, Any]:
    """What DCP saves: the tensors themselves, by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(run.model, getattr(run.optimizer, "optimizer", run.optimizer))
    return {"model": model, "optimizer": optimizer}


class Replaced:
    """A folder that each save of a peer writes anew, beside the last one, which is then deleted.

    Args:
        folder: Where the last save is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new = folder.with_suffix(".new")

    def begin(self) -> str:
        """Where to write to."""
        if rank() == 0:
            self._new.mkdir(parents=True)
        barrier()
        return str(self._new)

    def end(self) -> None:
        """Delete the last one."""
        barrier()
        if rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._new.rename(self.folder)
        barrier()

    def save(self, write: Callable[[str], object]) -> None:
        """Have it written at once."""
        write(self.begin())
        self.end()


def measure_saves(
    ours: Run, peer: Run | None, root: Path, rounds: int
) -> dict[str, Mapping[str, list[float]]]:
    """Seconds of saves until they are on the disk, and what they take of the processor on this rank."""
    import torch.distributed.checkpoint as dcp

    raw, folder = Raw(ours.tensors(), root), Replaced(root / "dcp")

    def in_background() -> None:
        ours.accelerator.save_state(background=True)
        ours.accelerator.wait_for_save()

    contestants: dict[str, Callable[[], object]] = {
        "raw write": raw.write,
        "drivetrain": lambda: ours.accelerator.save_state(),
        "drivetrain, in the background": in_background,
    }
    if peer is not None:
        contestants["Accelerate"] = lambda: Replaced(peer.folder).save(peer.accelerator.save_state)
    contestants["DCP"] = lambda: folder.save(lambda where: dcp.save(dcp_state(ours), checkpoint_id=where))
    spent: dict[str, list[float]] = {name: [] for name in contestants}

    def counting(name: str) -> Callable[[], None]:
        def call() -> None:
            before = time.process_time()
            contestants[name]()
            spent[name].append(time.process_time() - before)

        return call

    seconds = take_turns(
        {name: timed(counting(name), before=lambda: evict(root)) for name in contestants},
        rounds=rounds,
        shown=rank() == 0,
    )
    return {"save": seconds, "processor": {name: each[-rounds:] for name, each in spent.items()}}


def measure_held(ours: Run, overlapping: Run, root: Path, rounds: int) -> Mapping[str, list[float]]:
    """Seconds that training is held by a save: all of one at once, and what comes before one in the background."""
    import torch.distributed.checkpoint as dcp

    folder = Replaced(root / "dcp")
    pending: list[Any] = []

    def held(begin: Callable[[], object], wait: Callable[[], object]) -> Turn:
        def turn() -> float:
            # As in training: nothing else has just gone through the memory.
            seconds = timed(begin, level=False)()
            wait()
            return seconds

        return turn

    own_group = dist.new_group(backend="gloo") if num_ranks() > 1 else None  # else it meets our barriers

    def begin_dcp() -> None:
        pending.append(dcp.async_save(dcp_state(ours), checkpoint_id=folder.begin(), process_group=own_group))

    def wait_for_dcp() -> None:
        pending.pop().result()
        folder.end()

    contestants = {
        "drivetrain, at once": timed(lambda: ours.accelerator.save_state(), before=lambda: evict(root)),
        "drivetrain, in the background": held(
            lambda: ours.accelerator.save_state(background=True), ours.accelerator.wait_for_save
        ),
        "drivetrain, in the background, overlap": lambda: held_with_overlap(overlapping),
    }
    if num_ranks() > 1:  # its background needs a group
        contestants["DCP, in the background"] = held(begin_dcp, wait_for_dcp)
    return take_turns(contestants, rounds=rounds, shown=rank() == 0)


def held_with_overlap(run: Run) -> float:
    """Seconds that a save holds training whose copies are made meanwhile: its call, and the wait of the next step.

    Between the two are the forward and backward of the saved model.
    """
    start = time.perf_counter()
    run.accelerator.save_state(background=True)
    held = time.perf_counter() - start
    run.model(torch.ones(HELD_ITEMS, WIDTH)).square().mean().backward()
    (checkpointer,) = run.accelerator._parts.checkpointers
    start = time.perf_counter()
    checkpointer.wait_for_copies()
    held += time.perf_counter() - start
    for parameter in run.parameters:
        parameter.grad = None
    run.accelerator.wait_for_save()
    return held


def measure_loads(
    ours: Run, peer: Run | None, root: Path, rounds: int
) -> dict[str, Mapping[str, list[float]]]:
    """Seconds of loads, from the disk and from the cache."""
    import torch.distributed.checkpoint as dcp

    raw = Raw(ours.tensors(), root)
    ours.accelerator.save_state()
    raw.write()
    loads: dict[str, Callable[[], object]] = {"drivetrain": lambda: ours.accelerator.load_state()}
    if peer is not None:
        Replaced(peer.folder).save(peer.accelerator.save_state)
        loads["Accelerate"] = lambda: peer.accelerator.load_state(str(peer.folder))
    Replaced(root / "dcp").save(lambda folder: dcp.save(dcp_state(ours), checkpoint_id=folder))
    loads["DCP"] = lambda: dcp.load(dcp_state(ours), checkpoint_id=str(root / "dcp"))
    cold = {"raw read": raw.read, **loads}
    warm = {"raw read, hash and copy": lambda: raw.read(hashed=True), **loads}
    return {
        "cold": take_turns(
            {name: timed(call, before=lambda: evict(root)) for name, call in cold.items()},
            rounds=rounds,
            shown=rank() == 0,
        ),
        "warm": take_turns(
            {name: timed(call) for name, call in warm.items()}, rounds=rounds, shown=rank() == 0
        ),
    }


def measure_steps(ours: Run, overlapping: Run, rounds: int) -> Mapping[str, list[float]]:
    """The time of a step of training, while nothing is saved and while the state is written in the background."""
    layers = nn.Sequential(*(nn.Linear(STEP_WIDTH, STEP_WIDTH) for _ in range(8)))
    optimizer = AdamW(layers.parameters())
    items = torch.ones(STEP_ITEMS, STEP_WIDTH)

    def step() -> float:
        start = time.perf_counter()
        layers(items).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    runs = {"a save in the background": ours, "a save in the background, overlap": overlapping}
    quiet: list[float] = []
    found: dict[str, list[float]] = {"nothing is saved": quiet, **{name: [] for name in runs}}
    for _ in range(rounds):
        quiet.append(sum(step() for _ in range(50)) / 50)
        for name, run in runs.items():
            run.accelerator.save_state(background=True)
            times = []
            while any(thread.name.startswith("drivetrain save") for thread in threading.enumerate()):
                times.append(step())
            found[name].append(sum(times) / len(times))
            run.accelerator.wait_for_save()
    return found


def measure_memory(ours: Run) -> dict[str, float]:
    """Peak memory beyond the live state, of a rank."""
    found: dict[str, float] = {}
    for name, call in {
        "save at once": lambda: ours.accelerator.save_state(),
        "save in the background": lambda: (
            ours.accelerator.save_state(background=True),
            ours.accelerator.wait_for_save(),
        ),
        "load": lambda: ours.accelerator.load_state(),
    }.items():
        with record_peak() as memory:
            call()
        found[name] = memory.host_bytes - memory.host_before_bytes
    return found


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure everything; rank 0 writes what it found."""
    root = Path(arguments.folder)
    ours = Run("drivetrain", root / "drivetrain")
    memory = measure_memory(ours)
    peer = Run("accelerate", root / "accelerate", like=ours) if installed("accelerate") else None
    found: dict[str, Any] = {**measure_saves(ours, peer, root, arguments.rounds)}
    overlapping = Run("drivetrain", root / "overlapping", like=ours, staging="overlap")
    found["held"] = measure_held(ours, overlapping, root, arguments.rounds)
    found |= measure_loads(ours, peer, root, arguments.rounds)
    found["step"] = measure_steps(ours, overlapping, arguments.rounds)
    found["memory"] = memory
    found["bytes"] = Raw(ours.tensors(), root).size_bytes
    if rank() == 0:
        (root / "found.json").write_text(json.dumps(found))
    overlapping.accelerator.end_training()
    ours.accelerator.end_training()


def measure(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one number of ranks measured, each rank a process."""
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        script = [sys.argv[0], "--worker", "--rounds", str(arguments.rounds), "--folder", folder]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(launcher if ranks > 1 else []), *script]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads((Path(folder) / "found.json").read_text())


def tables_of(found: Mapping[str, Any], ranks: int) -> list[Table]:
    """What was measured, for people."""
    size = f"{found['bytes'] / 1e9:.1f} GB, {ranks} rank{'s' if ranks > 1 else ''}"
    return [
        Table(title=f"Save, {size}, until it is on the disk", unit="s", measured=found["save"]),
        Table(title=f"Save, {size}: processor time of a rank", unit="s", measured=found["processor"]),
        Table(title=f"Save, {size}: how long training is held", unit="s", measured=found["held"]),
        Table(title=f"Load, {size}, from the disk", unit="s", measured=found["cold"]),
        Table(title=f"Load, {size}, from the cache", unit="s", measured=found["warm"]),
        Table(title=f"A step of training, {size}", unit="ms", measured=found["step"]),
        Table(
            title=f"Peak memory of a rank beyond its live state, {size}",
            unit="MB",
            measured={name: [size_bytes] for name, size_bytes in found["memory"].items()},
        ),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument(
        "--disk", type=Path, help="a folder on the disk to measure; by default that of temporary files"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    tables = [table for ranks in arguments.ranks for table in tables_of(measure(ranks, arguments), ranks)]
    report("checkpoint", tables, arguments)


if __name__ == "__main__":
    main()
