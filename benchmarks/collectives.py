"""What gathering and reducing a dict of 20 tensors costs beyond one flat collective: two gloo processes.

    uv run --group bench python benchmarks/collectives.py

The flat collective gets its 20 x 32 x 4 numbers ready-made in one tensor, and is as fast as torch itself can be.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from rounds import Table, installed, on_two_ranks, repeated, report, take_turns

CALLS = 20  # in one turn
TENSORS = {f"metric {i}": torch.randn(32, 4) for i in range(20)}
FLAT = torch.cat([tensor.flatten() for tensor in TENSORS.values()])


def gathering() -> dict[str, Callable[[], object]]:
    """Contestants that gather the dict."""
    from drivetrain import Accelerator

    ours = Accelerator(cpu=True)
    gathered = torch.empty(dist.get_world_size() * FLAT.numel())
    contestants: dict[str, Callable[[], object]] = {
        "torch, one flat all_gather": lambda: dist.all_gather_into_tensor(gathered, FLAT),
        "torch, one all_gather a tensor": lambda: [_gather_one(tensor) for tensor in TENSORS.values()],
        "drivetrain": lambda: ours.gather(TENSORS),
    }
    if installed("accelerate"):
        from accelerate import Accelerator as Peer

        peer = Peer(cpu=True)
        contestants["Accelerate"] = lambda: peer.gather(TENSORS)
    return contestants


def reducing() -> dict[str, Callable[[], object]]:
    """Contestants that add the dict up over ranks."""
    from drivetrain import Accelerator

    ours = Accelerator(cpu=True)
    contestants: dict[str, Callable[[], object]] = {
        "torch, one flat all_reduce": lambda: dist.all_reduce(FLAT.clone()),
        "torch, one all_reduce a tensor": lambda: [
            dist.all_reduce(tensor.clone()) for tensor in TENSORS.values()
        ],
        "drivetrain": lambda: ours.reduce(TENSORS, "sum"),
    }
    if installed("accelerate"):
        from accelerate import Accelerator as Peer

        peer = Peer(cpu=True)
        contestants["Accelerate"] = lambda: peer.reduce(TENSORS, "sum")
    return contestants


def _gather_one(tensor: torch.Tensor) -> torch.Tensor:
    gathered = torch.empty(dist.get_world_size() * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor)
    return gathered


def measure(arguments: argparse.Namespace) -> None:
    """Time the contestants. Called on both ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tables: list[Table] = []
    for title, contestants in (("gather", gathering()), ("reduce", reducing())):
        turns = {name: repeated(call, times=CALLS, before=dist.barrier) for name, call in contestants.items()}
        seconds = take_turns(turns, rounds=arguments.rounds)
        tables.append(Table(title=f"{title} of 20 tensors of 32 x 4", unit="us", measured=seconds))
    if dist.get_rank() == 0:
        report("collectives", tables, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks(__doc__, measure, rounds=31)
