"""A training step of divided layers, sequences or experts against plain torch, time and peak memory; and planning.

    uv run --group bench python benchmarks/parallel.py

Two ranks over gloo on the CPU, a thread each, train one Llama of 10 million parameters on the same batch, and divide
the same layers in the same way, with or without what stands between them; one of 7 million on longer sequences, which
they divide; or a model of 10 million, most of them experts, on a batch each. Contestants whose losses differ are an
error. Times are of contestants that take turns in the same processes; peaks of memory are of processes of their own.
The second part plans meshes of many ranks, and models of many layers.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import parallel_by_hand as by_hand
import torch
import torch.distributed as dist
from parallel_models import ITEMS, TOKENS, Step, llama, loop, make, make_long, make_routed, mesh
from rounds import RESULTS, Goal, Table, found_by_ranks, repeated, report, take_turns
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from drivetrain_memory import record_peak

STEPS = 2  # before the peak is read
LIBRARIES = """
    torch.distributed.tensor.parallel torch.distributed.fsdp drivetrain.accelerator.accelerator
    drivetrain_backends.composed.divided_layers drivetrain_backends.composed.divided_sequences
    drivetrain_backends.ddp.backend drivetrain_backends.fsdp.backend
"""
RANKS_ASKED = 20  # of a mesh, for the members of all views


def package_alone(**styles: str) -> Step:
    """drivetrain-parallel in the loop of plain torch; `styles` are of layers, by their names."""
    from drivetrain_parallel import GroupRanks, divide_model, plan_model

    model, x = make()
    plan = plan_model(model, dist.get_world_size(), styles)
    divide_model(model, plan, GroupRanks(mesh().get_group("tensor")))
    return loop(model, x)


def prepared(made: Callable[[], tuple[nn.Module, Tensor]], **dims: Any) -> Step:
    """The documented loop of drivetrain, on a model and its batch; `dims` are those of `ParallelDims`."""
    from drivetrain import Accelerator, ParallelDims

    backend = {"tensor": "single", "context": "ddp", "shard": "fsdp"}[next(iter(dims))]
    prepares = Accelerator(
        backend=backend, parallelism=ParallelDims(**dims), sections={"run": {"show_plan": False}}, cpu=True
    )
    model, x = made()
    model, optimizer = prepares.prepare(model, AdamW(model.parameters()))

    def step() -> float:
        loss = model(x, labels=x).loss
        prepares.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return prepares.reduce(loss.detach(), "mean").item() if backend == "fsdp" else loss.item()

    return step


def transformers_own() -> Step:
    """The library's own tensor parallelism, which divides a model as it is loaded."""
    from transformers.distributed import DistributedConfig

    model, x = make()
    folder = [""]
    with tempfile.TemporaryDirectory() as made:
        if dist.get_rank() == 0:
            folder = [made]
            model.save_pretrained(made)
        dist.broadcast_object_list(folder)
        config = DistributedConfig(tp_size=dist.get_world_size())
        divided = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=config)
        dist.barrier()
    return loop(divided.train(), x)


# By what is divided: the contestants, the first without drivetrain, and the tokens of their step.
COMPARISONS: dict[str, tuple[dict[str, Callable[[], Step]], int]] = {
    "layers": (
        {
            "torch, parallelize_module": by_hand.layers,
            "drivetrain, Accelerator": partial(prepared, make, tensor=2),
            "drivetrain-parallel alone": package_alone,
            "the same, with joined logits": partial(package_alone, lm_head="gathered_column"),
            "transformers, tp_size": transformers_own,
        },
        ITEMS * TOKENS,
    ),
    "sequences": (
        {
            "torch, heads exchanged by hand": by_hand.sequences,
            "drivetrain, context": partial(prepared, make_long, context=2),
        },
        8 * TOKENS,
    ),
    "layers, and sequences between them": (
        {
            "torch, gathers and reductions by hand": by_hand.between_layers,
            "drivetrain, tensor and sequence": partial(prepared, make, tensor=2, sequence=True),
        },
        ITEMS * TOKENS,
    ),
    "experts": (
        {
            "torch, FSDP2 and tokens exchanged by hand": by_hand.experts,
            "the same, experts by FSDP2 over one rank": partial(by_hand.experts, sharded=True),
            "drivetrain, expert": partial(prepared, make_routed, shard=2, expert=2),
        },
        2 * ITEMS * TOKENS,
    ),
}


def compared(arguments: argparse.Namespace) -> dict[str, tuple[dict[str, Callable[[], Step]], int]]:
    """The comparisons that the command line asks for."""
    return {what: one for what, one in COMPARISONS.items() if arguments.only in ("", what)}


def measure(arguments: argparse.Namespace) -> None:
    """What each rank does: time all contestants, or train as one of them and tell the peak; rank 0 writes it down."""
    dist.init_process_group("gloo")
    found: dict[str, list[float]]
    if name := arguments.contestant:
        for library in LIBRARIES.split():
            import_module(library)  # so that libraries count for none
        mesh()
        with record_peak() as peak:
            step = next(all_of[name] for all_of, _ in COMPARISONS.values() if name in all_of)()
            for _ in range(STEPS):
                step()
        highest = torch.tensor(peak.host_bytes - peak.host_before_bytes)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        found = {name: [float(highest)]}
    else:
        steps: dict[str, Step] = {}
        for contestants, _ in compared(arguments).values():
            steps |= {name: begin() for name, begin in contestants.items()}
            losses = {name: [steps[name]() for _ in range(2)][-1] for name in contestants}
            if max(losses.values()) - min(losses.values()) > 1e-3:
                raise RuntimeError(f"after one step contestants train differently: {losses}")
        turns = {name: repeated(step, times=1, before=dist.barrier) for name, step in steps.items()}
        found = take_turns(turns, rounds=arguments.rounds, shown=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of several libraries' groups do not survive the interpreter's end


def run(arguments: argparse.Namespace, contestant: str = "") -> dict[str, list[float]]:
    """Run this script as two ranks."""
    own = ["--rounds", str(arguments.rounds), "--contestant", contestant, "--only", arguments.only]
    # glibc's heap keeps holes between large tensors, other ones in each process, which would count as tensors.
    heap = {"MALLOC_MMAP_THRESHOLD_": str(2**16)} if contestant else {}
    return found_by_ranks(2, *own, **heap)


def plan_mesh(num_ranks: int) -> None:
    """Plan a mesh, and ask it for the members of all views of some of its ranks."""
    from drivetrain_state import ParallelDims
    from drivetrain_state.mesh import View

    plan = ParallelDims(shard=num_ranks // 16, context=2, tensor=8, expert=8).plan(num_ranks)
    for rank in range(0, num_ranks, max(1, num_ranks // RANKS_ASKED)):
        for view in get_args(View):
            plan.members(rank, view)


def planning(arguments: argparse.Namespace) -> list[Table]:
    """Time what every rank computes before it divides anything."""
    from drivetrain_parallel import plan_model

    with torch.device("meta"):
        models: dict[str, nn.Module] = {
            f"Llama, {layers} layers of width {width}": llama(num_layers=layers, width=width)
            for layers, width in ((2, 256), (32, 256), (2, 4096))
        }
        config = GPT2Config(n_embd=256, n_layer=32, n_head=8, vocab_size=8192, bos_token_id=0, eos_token_id=0)
        models["GPT-2, 32 layers of width 256, without a plan of its own"] = GPT2LMHeadModel(config)
    meshes = {f"{n:,} ranks": repeated(lambda n=n: plan_mesh(n), times=1) for n in (16, 160, 1_600, 10_000)}
    divisions = {
        name: repeated(lambda model=model: plan_model(model, 2), times=1) for name, model in models.items()
    }
    return [
        Table(
            title=f"planning: a mesh, and the members of all views for up to {RANKS_ASKED} ranks",
            unit="ms",
            measured=take_turns(meshes, rounds=arguments.rounds, shown=False),
        ),
        Table(
            title="planning: plan_model on meta, for 2 ranks",
            unit="ms",
            measured=take_turns(divisions, rounds=arguments.rounds, warmup=0, within_seconds=10),
        ),
    ]


def parse() -> argparse.Namespace:
    """The command line; --out and --contestant are for the script's own processes."""
    parser = argparse.ArgumentParser(description="A training step of divided layers against plain torch.")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument(
        "--only", default="", choices=("", *COMPARISONS), help="one comparison; by default all"
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Time every contestant, measure its memory, then time planning."""
    arguments = parse()
    if arguments.out:
        measure(arguments)
        return
    times = run(arguments)
    peaks: dict[str, list[float]] = {}
    for name in times:
        peaks |= run(arguments, name)
    tables: list[Table] = []
    for what, (contestants, num_tokens) in compared(arguments).items():
        first, *others = contestants
        goals = [Goal(of=name, beside=first, most=1.03) for name in others if name.startswith("drivetrain")]
        measured = {name: times[name] for name in contestants}
        rates = {"tokens/s": num_tokens}
        tables += [
            Table(
                title=f"one step of divided {what}, two ranks",
                unit="ms",
                measured=measured,
                rates=rates,
                goals=goals,
            ),
            Table(
                title=f"peak memory of a rank, divided {what}",
                unit="MB",
                measured={name: peaks[name] for name in contestants},
                goals=goals,
            ),
        ]
    tables += planning(arguments) if not arguments.only else []
    note = (
        "A step of torch's and of drivetrain's adds up 17 times in forward and 17 in backward, and gathers once: "
        "logits, or two\nnumbers of each token's loss where drivetrain does not join them. Plans of models are timed "
        "for 10 seconds, one round at least. Of a peak of drivetrain's, 6 MB are its groups and its watch over "
        "hangs: as many of a model of\n40,000 parameters. Experts of one rank each are FSDP2's too, as of several."
    )
    report("parallel", tables, arguments, note=note)


if __name__ == "__main__":
    main()
