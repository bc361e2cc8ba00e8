"""A forward of a model whose weights are on the disk, and what dispatching costs a module.

    uv run --group bench python benchmarks/offload.py

2.15 GB of weights in 128 layers, computed by the host: in memory; by drivetrain and by Accelerate from the disk,
first with the files in the page cache, then with all of them dropped from it before each turn; a plain read of the
same bytes beside them. Then a mixture of experts, of which each item uses others. Then 1.5 GB of weights, each
contestant in a process of its own, which joins a control group of half of that when it has imported what it needs;
and what such a process has in memory after a forward where nothing limits it. Then 193 tiny modules, whose forward
is all overhead: with weights in place, with weights copied before their use, and by Accelerate.
"""

import argparse
import ctypes
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from mmap import PAGESIZE
from pathlib import Path

import torch
from control_group import join, limited_group
from plain_files import evict
from rounds import Table, installed, parse_arguments, repeated, report, take_turns
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_dispatch import (
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_stats,
)

WIDTH, LAYERS, ITEMS = (
    2048,
    128,
    4,
)  # weights as large as the caches are small: memory decides, as in generation
NUM_TINY, TINY = 193, 16
MIXTURES, NUM_EXPERTS, EXPERT = 8, 32, 1024
LIMITED_LAYERS = 90  # 1.5 GB
BUFFER_BYTES = 8 * 2**20
_DONTNEED = 4  # madvise: pages that are mapped are not dropped from the cache


def stack(width: int, layers: int) -> nn.Module:
    """Linear layers, without the time of drawing their weights."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        nn.init.eye_(parameter)
        parameter.data[0, 0] = 1 + index / layers
    return model.eval()


def forward(model: nn.Module, items: int) -> Callable[[], Tensor]:
    """One forward, by a model or its like."""
    batch = torch.ones(items, next(model.parameters()).shape[-1])

    def call() -> Tensor:
        with torch.inference_mode():
            return model(batch)

    return call


def plain_read(folder: Path) -> Callable[[], None]:
    """Read the files of a folder into one buffer, again and again."""
    buffer = bytearray(BUFFER_BYTES)

    def call() -> None:
        for path in sorted(folder.iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return call


def accelerate_model(model: nn.Module, folder: Path) -> nn.Module:
    """Accelerate's way: its own copy on the disk."""
    from accelerate import disk_offload as peer

    return peer(model, str(folder), execution_device=torch.device("cpu"))


def evicted(call: Callable[[], object], model: nn.Module | None, folder: Path) -> Callable[[], float]:
    """A turn that begins with nothing of a folder in the page cache."""

    def before() -> None:
        if model is not None and sys.platform == "linux":
            madvise = ctypes.CDLL(None).madvise
            for parameter in model.parameters():
                if not parameter.is_meta:
                    start = -(-parameter.data_ptr() // 4096) * 4096
                    madvise(
                        ctypes.c_void_p(start), ctypes.c_size_t(parameter.nbytes // 4096 * 4096), _DONTNEED
                    )
        evict(folder)

    return repeated(call, times=1, before=before)


def from_the_disk(arguments: Namespace, root: Path) -> list[Table]:
    """The forward of a large model."""
    ours, theirs = root / "ours", root / "theirs"
    memory = stack(WIDTH, LAYERS)
    models: dict[str, tuple[nn.Module | None, Path]] = {
        "drivetrain, disk": (disk_offload(stack(WIDTH, LAYERS), ours), ours)
    }
    if installed("accelerate"):
        models["Accelerate, disk"] = (accelerate_model(stack(WIDTH, LAYERS), theirs), theirs)
    calls: dict[str, Callable[[], object]] = {"in memory": forward(memory, ITEMS)}
    calls |= {name: forward(model, ITEMS) for name, (model, _) in models.items() if model is not None}
    expected = calls["in memory"]()
    for name, call in calls.items():
        assert torch.equal(expected, call()), name
    # A file of its own: pages that a model maps are not dropped from the cache.
    plain = root / "plain"
    plain.mkdir()
    shutil.copy(next(ours.iterdir()), plain)
    calls["plain read"] = plain_read(plain)
    warm = take_turns(
        {name: repeated(call, times=1) for name, call in calls.items()}, rounds=arguments.rounds
    )
    cold = take_turns(
        {name: evicted(call, *models.get(name, (None, plain))) for name, call in calls.items()},
        rounds=arguments.rounds,
    )
    bound = [max(one, other) for one, other in zip(cold["in memory"], cold["plain read"], strict=True)]
    return [
        Table(title="A forward of 2.15 GB, files in the page cache", unit="s", measured=warm),
        Table(
            title="A forward of 2.15 GB, files not in the page cache",
            unit="s",
            measured={"the slower of memory and read": bound, **cold},
        ),
    ]


class Mixture(nn.Module):
    """A layer of experts, of which each item uses two."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Mix what the two give that the router prefers."""
        shares, chosen = self.router(x).topk(2)
        rows = [
            sum(share * self.experts[int(index)](row) for share, index in zip(*pair, strict=True))
            for row, *pair in zip(x, shares.softmax(-1), chosen, strict=True)
        ]
        return x + torch.stack([torch.as_tensor(row) for row in rows])


def mixture() -> nn.Module:
    """Layers of experts: the same ones whenever they are made."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mixture(EXPERT, NUM_EXPERTS) for _ in range(MIXTURES))).eval()


def of_experts(arguments: Namespace, root: Path) -> list[Table]:
    """The forward of a mixture of experts, of one item after the other."""
    models = {"in memory": mixture(), "drivetrain, disk": disk_offload(mixture(), root / "experts")}
    if installed("accelerate"):
        models["Accelerate, disk"] = accelerate_model(mixture(), root / "experts-theirs")
    items = [torch.randn(1, EXPERT, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def turn(model: nn.Module) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            with torch.inference_mode():
                return [model(item) for item in items]

        return call

    calls = {name: turn(model) for name, model in models.items()}
    expected = calls["in memory"]()
    assert all(
        torch.equal(one, other) for one, other in zip(expected, calls["drivetrain, disk"](), strict=True)
    )
    seconds = take_turns(
        {name: repeated(call, times=1) for name, call in calls.items()}, rounds=arguments.rounds
    )
    each = {name: [value / len(items) for value in values] for name, values in seconds.items()}
    gigabytes = sum(parameter.nbytes for parameter in models["in memory"].parameters()) / 1e9
    title = (
        f"An item through {MIXTURES} layers of {NUM_EXPERTS} experts, {gigabytes:.2f} GB, in the page cache"
    )
    return [Table(title=title, unit="ms", measured=each)]


def resident_bytes() -> int:
    """Return what the system shows as this process's memory: its own, and pages of files that it has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def limited_worker(name: str, folder: Path, group: Path | None) -> None:
    """Be a contestant's process: for each line that it is sent, a forward, its seconds and the memory it leaves."""
    before = resident_bytes()
    if group is not None:
        join(group)
    if name == "plain read":
        call: Callable[[], object] = plain_read(folder)
    elif name == "in memory":
        call = forward(stack(WIDTH, LIMITED_LAYERS), ITEMS)
    elif name.startswith("drivetrain, disk"):
        released = name.endswith("released")
        with init_empty_weights():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LIMITED_LAYERS)))
        load_checkpoint_and_dispatch(model.eval(), folder, {"": "disk"}, release_pages=released)
        call = forward(model, ITEMS)
    else:
        from accelerate import init_empty_weights as peer_empty
        from accelerate import load_checkpoint_and_dispatch as peer

        with peer_empty():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LIMITED_LAYERS)))
        devices = {"0": "cpu"} | {str(index): "disk" for index in range(1, LIMITED_LAYERS)}
        call = forward(
            peer(model.eval(), str(folder), device_map=devices, offload_folder=str(folder / "theirs")), ITEMS
        )
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        call()
        print(time.perf_counter() - start, resident_bytes() - before, flush=True)


def in_a_group(arguments: Namespace, root: Path) -> list[Table]:
    """The forward of a model that is twice as large as what the process may take."""
    folder = root / "limited"
    folder.mkdir()
    save_file(stack(WIDTH, LIMITED_LAYERS).state_dict(), folder / "model.safetensors")
    evict(folder)
    size_bytes = (folder / "model.safetensors").stat().st_size
    names = ["in memory", "plain read", "drivetrain, disk"]
    names += ["Accelerate, disk"] if installed("accelerate") else []
    seconds: dict[str, list[float]] = {}
    for name in names:  # one process at a time has the machine
        with limited_group(size_bytes // 2) as group:
            if group is None:
                print("no control group can be made here: nothing is measured in one", file=sys.stderr)
                return []
            words = [sys.executable, __file__, "--worker", name, "--folder", str(folder)]
            words += [] if name == "in memory" else ["--group", str(group)]
            seconds[name], _ = asked(words, arguments.rounds)
        evict(folder)
    bound = [max(one, other) for one, other in zip(seconds["in memory"], seconds["plain read"], strict=True)]
    gigabytes = size_bytes / 1e9
    return [
        Table(
            title=f"A forward of {gigabytes:.2f} GB in a control group of {gigabytes / 2:.2f} GB",
            unit="s",
            measured={"the slower of memory and read": bound, **seconds},
        )
    ]


def shown_memory(arguments: Namespace, root: Path) -> list[Table]:
    """What a process that runs a model is shown to take."""
    folder = root / "shown"
    folder.mkdir()
    save_file(stack(WIDTH, LIMITED_LAYERS).state_dict(), folder / "model.safetensors")
    gigabytes = (folder / "model.safetensors").stat().st_size / 1e9
    names = ["in memory", "drivetrain, disk", "drivetrain, disk, pages released"]
    names += ["Accelerate, disk"] if installed("accelerate") else []
    words = [sys.executable, __file__, "--folder", str(folder), "--worker"]
    found = {name: asked([*words, name], arguments.rounds) for name in names}
    title = f"A forward of {gigabytes:.2f} GB in the page cache"
    seconds, left = ({name: each[at] for name, each in found.items()} for at in (0, 1))
    return [
        Table(title=title, unit="s", measured=seconds),
        Table(title=f"{title}: resident memory behind it", unit="MB", measured=left),
    ]


def asked(command: list[str], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a worker's calls and the bytes that they leave, after one that does not count.

    Both are infinite once it was ended for its memory.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ready = process.stdout.readline() == "ready\n"
        found: list[tuple[float, float]] = []
        for _ in range(rounds + 1 if ready else 0):
            process.stdin.write("\n")
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                break
            found.append(tuple(map(float, line.split())))
            print(f"{command[2:]}: {line.strip()}", file=sys.stderr)
        process.stdin.close()
    if process.returncode:
        print(f"{command[2:]}: ended with {process.returncode}", file=sys.stderr)
    found = found[1:] + [(math.inf, math.inf)] * (rounds - max(0, len(found) - 1))
    return [seconds for seconds, _ in found], [left for _, left in found]


def a_module(arguments: Namespace, root: Path) -> Table:
    """What dispatching adds to a module's forward."""
    copied = stack(TINY, NUM_TINY)
    dtypes = {name: parameter.dtype for name, parameter in copied.named_parameters()}
    models: Mapping[str, nn.Module] = {
        "in memory": stack(TINY, NUM_TINY),
        "drivetrain, in place": disk_offload(stack(TINY, NUM_TINY), root / "tiny"),
        "drivetrain, copied": dispatch_model(copied, {"": "cpu"}, dtypes=dtypes),
    }
    if installed("accelerate"):
        models = {**models, "Accelerate, disk": accelerate_model(stack(TINY, NUM_TINY), root / "tiny-theirs")}
    turns = {name: repeated(forward(model, 1), times=20) for name, model in models.items()}
    seconds = take_turns(turns, rounds=arguments.rounds, shown=False)
    print(f"missed: {offload_stats(copied).num_missed}", file=sys.stderr)
    each = {name: [value / NUM_TINY for value in values] for name, values in seconds.items()}
    print(
        {name: f"{statistics.median(values) * 1e6:.1f} us" for name, values in each.items()}, file=sys.stderr
    )
    return Table(title=f"A module of {NUM_TINY}, {TINY} x {TINY}, a forward", unit="us", measured=each)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--only",
        choices=["a module", "the disk", "experts", "a group", "memory"],
        help="a part of the tables",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    chosen, sys.argv[1:] = parser.parse_known_args()
    if chosen.worker:
        limited_worker(chosen.worker, chosen.folder, chosen.group)
        return
    arguments = parse_arguments(__doc__ or "", rounds=7)
    parts: dict[str, Callable[[Namespace, Path], list[Table]]] = {
        "the disk": from_the_disk,
        "experts": of_experts,
        "a group": in_a_group,
        "memory": shown_memory,
        "a module": lambda arguments, root: [a_module(arguments, root)],
    }
    tables: list[Table] = []
    for name, part in parts.items():
        if chosen.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="offload-", dir=Path.cwd()) as folder:
                tables += part(arguments, Path(folder))
    report("offload", tables, arguments)


if __name__ == "__main__":
    main()
