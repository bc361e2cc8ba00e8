"""Inference on two ranks: plain torch, drivetrain's ways for large models, and DeepSpeed's, in one run.

    uv run --group bench python benchmarks/inference_engines.py

Over gloo on the CPU, a thread a rank, one Llama of 10 million parameters. Where each rank has or gathers all weights,
each computes a batch of its own; where layers are cut, both compute one. A row is the time for one batch of the two
ranks together. DeepSpeed's kernels need CUDA and take no part; its sums go over
shared memory on a CPU, and ours over gloo.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import llama
from rounds import Table, on_two_ranks, repeated, report, take_turns
from torch import nn

from drivetrain import Accelerator, ParallelDims
from drivetrain_deepspeed import infer_with_deepspeed
from drivetrain_dispatch import disk_offload

ITEMS, TOKENS = 4, 64


def make() -> Any:
    """The model, the same on all ranks and each time."""
    torch.manual_seed(0)
    return llama().eval()


def contestants(folder: Path, context: Any) -> dict[str, nn.Module]:
    """The model in each way, whose logits are compared with those of the first."""
    accelerator = Accelerator(
        cpu=True, parallelism=ParallelDims(tensor=2), sections={"run": {"show_plan": False}}
    )
    return {
        "torch, all weights on each rank": make(),
        "drivetrain, weights in files": disk_offload(make(), folder),
        "DeepSpeed, weights gathered by layer": infer_with_deepspeed(make(), context=context, way="zero"),
        "drivetrain, layers cut": accelerator.prepare(make()),
        "DeepSpeed, layers cut": infer_with_deepspeed(make(), context=context, way="tensor"),
    }


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes the table."""
    accelerator = Accelerator(cpu=True, sections={"run": {"show_plan": False}})
    rank = dist.get_rank()
    words = torch.randint(256, (ITEMS, TOKENS), generator=torch.Generator().manual_seed(0))
    turns: dict[str, Callable[[], float]] = {}
    with TemporaryDirectory() as folder:
        models = contestants(Path(folder), accelerator.context)
        expected = next(iter(models.values()))(words).logits
        for name, model in models.items():
            torch.testing.assert_close(model(words).logits, expected, rtol=0, atol=1e-4)
            turn = repeated(
                lambda model=model: model(words), times=5, before=dist.barrier, after=dist.barrier
            )
            share = 1 if name.endswith("cut") else 2  # batches of both ranks in one turn
            turns[name] = lambda turn=turn, share=share: turn() / share
        found = take_turns(turns, rounds=arguments.rounds, shown=rank == 0)
    if rank == 0:
        table = Table(
            title="A batch of 4 x 64 tokens", unit="ms", measured=found, rates={"tokens/s": ITEMS * TOKENS}
        )
        report("inference_engines", [table], arguments)
    dist.barrier()


if __name__ == "__main__":
    on_two_ranks(__doc__ or "", measure, rounds=7)
