"""A training step of divided layers or sequences against plain torch, time and peak memory; and the time of planning.

    uv run --group bench python benchmarks/parallel.py

Two ranks over gloo on the CPU, a thread each, train one Llama of 10 million parameters on the same batch, and divide
the same layers in the same way, or one of 7 million on longer sequences, which they divide; contestants whose losses
differ are an error. Times are of contestants that take
turns in the same processes; peaks of memory are of processes of their own. The second part plans meshes of many
ranks, and models of many layers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from rounds import RESULTS, Goal, Table, repeated, report, take_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from drivetrain_memory import record_peak

ITEMS, TOKENS = 4, 128
STEPS = 2  # before the peak is read
RANKS_ASKED = 20  # of a mesh, for the members of all views
RAW = "torch, parallelize_module"
RAW_SEQUENCES = "torch, heads exchanged by hand"
Step = Callable[[], float]


def llama(*, num_layers: int = 8, width: int = 256, vocabulary: int = 8192) -> LlamaForCausalLM:
    """A Llama, of 10.5 million parameters in 8 layers."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4 * TOKENS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make() -> tuple[LlamaForCausalLM, Tensor]:
    """The model and its one batch, the same on all ranks."""
    torch.manual_seed(0)
    model = llama()
    return model, torch.randint(model.config.vocab_size, (ITEMS, TOKENS))


def mesh() -> DeviceMesh:
    """The two ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def loop(model: nn.Module, x: Tensor) -> Step:
    """PyTorch's own step."""
    optimizer = AdamW(model.parameters())

    def step() -> float:
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def raw() -> Step:
    """What an expert writes with torch alone: the input of each half of a block enters the divided layers once."""
    from torch.distributed.tensor import Placement, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = make()
    whole: dict[str, Placement] = {"hidden_states": Replicate()}
    of_block: dict[str, Any] = {
        "self_attn": PrepareModuleInput(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    plan: dict[str, Any] = {f"model.layers.*.{name}": style for name, style in of_block.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return loop(parallelize_module(model, mesh(), plan), x)


def package_alone(**styles: str) -> Step:
    """drivetrain-parallel in the loop of plain torch; `styles` are of layers, by their names."""
    from drivetrain_parallel import GroupRanks, divide_model, plan_model

    model, x = make()
    plan = plan_model(model, dist.get_world_size(), styles)
    divide_model(model, plan, GroupRanks(mesh().get_group("tensor")))
    return loop(model, x)


def accelerator() -> Step:
    """The documented loop of drivetrain."""
    from drivetrain import Accelerator, ParallelDims

    prepares = Accelerator(
        backend="single",
        parallelism=ParallelDims(tensor=dist.get_world_size()),
        sections={"run": {"show_plan": False}},
        cpu=True,
    )
    model, x = make()
    model, optimizer = prepares.prepare(model, AdamW(model.parameters()))

    def step() -> float:
        loss = model(x, labels=x).loss
        prepares.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

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


def make_long() -> tuple[LlamaForCausalLM, Tensor]:
    """A model of few words, and a batch of two long sequences, the same on all ranks."""
    torch.manual_seed(0)
    model = llama(vocabulary=256)
    return model, torch.randint(model.config.vocab_size, (2, 4 * TOKENS))


def raw_sequences() -> Step:
    """What an expert writes with torch alone: each rank reads its own half of the tokens, and exchanges heads."""
    import torch.nn.functional as F
    from torch.distributed.nn.functional import all_to_all_single
    from transformers import AttentionInterface

    def to_heads(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (2, -1)).movedim(1, 0).contiguous()
        return all_to_all_single(torch.empty_like(parts), parts).movedim(0, 2).flatten(2, 3)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        del module
        whole = (to_heads(x) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)  # type: ignore[arg-type]
        parts = mixed.unflatten(2, (2, -1)).movedim(2, 0).contiguous()
        own = all_to_all_single(torch.empty_like(parts), parts).movedim(0, 1).flatten(1, 2)
        return own.transpose(1, 2), None

    AttentionInterface.register("by_heads", attend)
    model, x = make_long()
    model.set_attn_implementation("by_heads")
    labels = F.pad(x[:, 1:], (0, 1), value=-100)
    own, half = dist.get_rank() * x.shape[1] // 2, x.shape[1] // 2
    x, labels = x[:, own : own + half], labels[:, own : own + half]
    positions = torch.arange(own, own + half)[None]
    optimizer, count = AdamW(model.parameters()), 2 * (2 * half - 1)

    def step() -> float:
        logits = model(x, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat)
        for one, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(summed.view_as(one))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        return loss.item()

    return step


def accelerator_sequences() -> Step:
    """The documented loop of drivetrain, on whole sequences."""
    from drivetrain import Accelerator, ParallelDims

    prepares = Accelerator(
        parallelism=ParallelDims(context=dist.get_world_size()),
        sections={"run": {"show_plan": False}},
        cpu=True,
    )
    model, x = make_long()
    model, optimizer = prepares.prepare(model, AdamW(model.parameters()))

    def step() -> float:
        loss = model(x, labels=x).loss
        prepares.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


CONTESTANTS: dict[str, Callable[[], Step]] = {
    RAW: raw,
    "drivetrain, Accelerator": accelerator,
    "drivetrain-parallel alone": package_alone,
    "the same, with joined logits": partial(package_alone, lm_head="gathered_column"),
    "transformers, tp_size": transformers_own,
}
SEQUENCES: dict[str, Callable[[], Step]] = {
    RAW_SEQUENCES: raw_sequences,
    "drivetrain, context": accelerator_sequences,
}


def measure(arguments: argparse.Namespace) -> None:
    """What each rank does: time all contestants, or train as one of them and tell the peak; rank 0 writes it down."""
    dist.init_process_group("gloo")
    found: dict[str, list[float]]
    if arguments.contestant:
        for library in ("torch.distributed.tensor.parallel", "drivetrain.accelerator.accelerator"):
            import_module(library)  # so that libraries count for none
        mesh()
        with record_peak() as peak:
            step = (CONTESTANTS | SEQUENCES)[arguments.contestant]()
            for _ in range(STEPS):
                step()
        highest = torch.tensor(peak.host_bytes - peak.host_before_bytes)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        found = {arguments.contestant: [float(highest)]}
    else:
        steps: dict[str, Step] = {}
        for contestants in (CONTESTANTS, SEQUENCES):
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
    """Run this script as two ranks under torch's own launcher, which favours no contestant."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [
            sys.argv[0],
            "--out",
            str(out),
            "--rounds",
            str(arguments.rounds),
            "--contestant",
            contestant,
        ]
        # glibc's heap keeps holes between large tensors, other ones in each process, which would count as tensors.
        heap = {"MALLOC_MMAP_THRESHOLD_": str(2**16)} if contestant else {}
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **heap})
        return json.loads(out.read_text())


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
    for what, contestants, num_tokens in (
        ("layers", CONTESTANTS, ITEMS * TOKENS),
        ("sequences", SEQUENCES, 8 * TOKENS),
    ):
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
    tables += planning(arguments)
    note = (
        "A step of torch's and of drivetrain's adds up 17 times in forward and 17 in backward, and gathers once: "
        "logits, or two\nnumbers of each token's loss where drivetrain does not join them. Plans of models are timed "
        "for 10 seconds, one round at least."
    )
    report("parallel", tables, arguments, note=note)


if __name__ == "__main__":
    main()
