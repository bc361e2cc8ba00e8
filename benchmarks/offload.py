"""A forward of a model whose weights are on the disk, and what dispatching costs a module.

    uv run --group bench python benchmarks/offload.py

2.15 GB of weights in 128 layers, computed by the host: in memory; by drivetrain and by Accelerate from the disk,
first with the files in the page cache, then with all of them dropped from it before each turn; a plain read of the
same bytes beside them. Then 193 tiny modules, whose forward is all overhead: with weights in place, with weights
copied before their use, and by Accelerate.
"""

import argparse
import ctypes
import shutil
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from plain_files import evict
from rounds import Table, installed, parse_arguments, repeated, report, take_turns
from torch import Tensor, nn

from drivetrain_dispatch import disk_offload, dispatch_model, offload_stats

WIDTH, LAYERS, ITEMS = (
    2048,
    128,
    4,
)  # weights as large as the caches are small: memory decides, as in generation
NUM_TINY, TINY = 193, 16
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
    parser.add_argument("--only", choices=["a module", "the disk"], help="a part of the tables")
    chosen, sys.argv[1:] = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rounds=7)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=Path.cwd()) as folder:
        tables = [] if chosen.only == "a module" else from_the_disk(arguments, Path(folder))
        if chosen.only != "the disk":
            tables.append(a_module(arguments, Path(folder)))
    report("offload", tables, arguments)


if __name__ == "__main__":
    main()
