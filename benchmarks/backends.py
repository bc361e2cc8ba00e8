"""A training step under each backend: time and peak memory against the script an expert writes for the same thing.

    uv run --group bench python benchmarks/backends.py

Two ranks (one for `single`), on GPUs where there are any, else on the CPU over gloo. Every loop clips by the global
norm and steps AdamW. Times are of contestants that take turns in the same processes; peaks
of memory are of processes of their own.

On the CPU Accelerate 1.15 trains by DDP whatever its FSDP or DeepSpeed plugin says, without a word of it; there it is
timed against DDP alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rounds import RESULTS, Table, installed, repeated, report, take_turns
from torch import Tensor, nn
from torch.optim import AdamW

from drivetrain_memory import PeakRecord, record_peak

WIDTH, BLOCKS, ITEMS = 512, 6, 64
STEPS = 3  # in one turn
Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        backend: Its name here.
        num_ranks: Processes.
        settings: The backend's section.
        plugin: Makes Accelerate's arguments for the same; None where there are none here.
        wrapper: The class that a model so trained is of; a peer that gives another does something else.
        raw: Makes the step of the expert's script.
    """

    backend: str
    raw: Callable[[], Step]
    num_ranks: int = 2
    settings: Mapping[str, Any] | None = None
    plugin: Callable[[], dict[str, Any]] | None = dict
    wrapper: str


class Block(nn.Module):
    """A transformer's feed-forward block; maps (items, width) to (items, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (items, width) to (items, width)."""
        return x + self.outer(nn.functional.gelu(self.inner(x)))


def device() -> torch.device:
    """This rank's."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def make() -> tuple[nn.Module, Tensor]:
    """A model of some 12.6 million parameters, and its one batch."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(ITEMS, WIDTH, device=device())


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    """PyTorch's own step."""

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw_single() -> Step:
    """Plain PyTorch."""
    model, x = make()
    model.to(device())
    return loop(model, AdamW(model.parameters()), x)


def raw_ddp() -> Step:
    """DistributedDataParallel, its gradients in its buckets."""
    model, x = make()
    devices = None if device().type == "cpu" else [device()]
    replica = nn.parallel.DistributedDataParallel(
        model.to(device()), device_ids=devices, gradient_as_bucket_view=True
    )
    return loop(replica, AdamW(replica.parameters()), x)


def raw_fsdp(*, reshard: bool, replicas: int = 1, offload: bool = False, checkpointed: bool = False) -> Step:
    """fully_shard of every block, and of the root; blocks that compute their activations again, where asked."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    model, x = make()
    if checkpointed:
        model = nn.Sequential(*(checkpoint_wrapper(block) for block in model.children()))
    model.to(device())
    ranks, names = dist.get_world_size(), ("replicate", "shard")
    mesh = init_device_mesh(device().type, (replicas, ranks // replicas), mesh_dim_names=names)
    options: dict[str, Any] = {
        "mesh": mesh if replicas > 1 else mesh["shard"],
        "reshard_after_forward": reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=device().type != "cpu") if offload else OffloadPolicy(),
    }
    for block in model.children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return loop(model, AdamW(model.parameters()), x)


def deepspeed_config(stage: int, offload: str) -> dict[str, Any]:
    """What an expert writes; what is left out is DeepSpeed's default."""
    elements = sum(p.numel() for p in make()[0].parameters())
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"reduce_bucket_size": elements, "offload_optimizer": {"device": offload}}
    if stage in (1, 2):
        zero["allgather_bucket_size"] = elements
    return {
        "train_micro_batch_size_per_gpu": ITEMS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def raw_deepspeed(*, stage: int, offload: str = "none") -> Step:
    """An engine with AdamW."""
    os.environ.setdefault("DS_ACCELERATOR", device().type)
    import deepspeed

    model, x = make()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=AdamW(model.parameters()), config=deepspeed_config(stage, offload)
    )

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def drivetrain_step(way: Way) -> Step:
    """The documented loop of drivetrain."""
    from drivetrain import Accelerator

    sections: dict[str, Any] = {"run": {"show_plan": False}}
    if way.settings is not None:
        sections[way.backend] = dict(way.settings)
    return accelerated(Accelerator(backend=way.backend, sections=sections, cpu=device().type == "cpu"))


def accelerate_step(way: Way) -> Step:
    """The documented loop of Accelerate."""
    from accelerate import Accelerator

    assert way.plugin is not None
    return accelerated(Accelerator(cpu=device().type == "cpu", **way.plugin()), wrapper=way.wrapper)


def accelerated(accelerator: Any, *, wrapper: str = "Module") -> Step:
    """The loop that both document.

    Raises:
        TypeError: The prepared model is not of the class that is to be timed.
    """
    model, x = make()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    if wrapper not in {kind.__name__ for kind in type(model).__mro__}:
        raise TypeError(f"{accelerator} trains a {type(model).__name__}, not a {wrapper}")

    def step() -> None:
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate_fsdp(*, reshard: bool) -> dict[str, Any]:
    """Accelerate's plugin for FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return {"fsdp_plugin": plugin}


def accelerate_deepspeed(*, stage: int, offload: str = "none") -> dict[str, Any]:
    """Accelerate's plugin for DeepSpeed, with the expert's configuration."""
    from accelerate import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed_config(stage, offload))}


def fsdp_ways() -> Iterator[tuple[str, Way]]:
    """Every strategy, and what may be added to one."""
    for title, settings, raw in (
        ("full_shard", {}, {"reshard": True}),
        ("shard_grad_op", {}, {"reshard": False}),
        ("hybrid_shard", {"shard_size": 1}, {"reshard": True, "replicas": 2}),
        ("no_shard", {}, {"reshard": False, "replicas": 2}),
        ("full_shard, offloaded", {"offload": True}, {"reshard": True, "offload": True}),
        (
            "full_shard, activations computed again",
            {"activation_checkpointing": "full"},
            {"reshard": True, "checkpointed": True},
        ),
    ):
        yield (
            title,
            Way(
                backend="fsdp",
                raw=partial(raw_fsdp, **raw),
                settings={"strategy": title.split(",")[0], "wrap": ("Block",), **settings},
                plugin=partial(accelerate_fsdp, reshard=raw["reshard"]) if len(raw) == 1 else None,
                wrapper="FSDPModule",
            ),
        )


def ways() -> dict[str, Way]:
    """Every way that is timed, by its title."""
    found = {
        "single": Way(backend="single", num_ranks=1, raw=raw_single, wrapper="Sequential"),
        "ddp": (ddp := Way(backend="ddp", raw=raw_ddp, wrapper="DistributedDataParallel")),
        "ddp, averaged at the close": replace(ddp, settings={"reduce": "at_close"}, plugin=None),
    }
    found |= {f"fsdp, {title}": way for title, way in fsdp_ways()}
    for stage, offload in ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")):
        title = f"deepspeed, stage {stage}{', optimizer offloaded' if offload == 'cpu' else ''}"
        found[title] = Way(
            backend="deepspeed",
            raw=partial(raw_deepspeed, stage=stage, offload=offload),
            settings={"stage": stage} | ({"offload_optimizer": offload} if stage else {}),
            plugin=partial(accelerate_deepspeed, stage=stage, offload=offload),
            wrapper="DeepSpeedEngine",
        )
    return found


def contestants(way: Way) -> dict[str, Callable[[], Step]]:
    """Who trains in this way."""
    found: dict[str, Callable[[], Step]] = {"raw": way.raw, "drivetrain": partial(drivetrain_step, way)}
    does_as_asked = device().type != "cpu" or way.backend in ("single", "ddp")
    if installed("accelerate") and way.plugin is not None and does_as_asked:
        found["Accelerate"] = partial(accelerate_step, way)
    return found


def measure(way: Way, arguments: argparse.Namespace) -> None:
    """What each rank does: time all contestants, or train as one of them and tell the peak; rank 0 writes it down."""
    if way.num_ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo")
    if device().type == "cuda":
        torch.cuda.set_device(device())
    found: dict[str, list[float]]
    if arguments.contestant:
        import_all(way)
        with record_peak() as peak:
            step = contestants(way)[arguments.contestant]()
            for _ in range(STEPS):
                step()
        found = {arguments.contestant: [float(highest_of_ranks(peak_bytes(peak)))]}
    else:
        turns = {name: repeated(synchronised(make()), times=STEPS) for name, make in contestants(way).items()}
        found = take_turns(turns, rounds=arguments.rounds)
    if not dist.is_initialized() or dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # threads of several libraries' groups do not survive the interpreter's end


def import_all(way: Way) -> None:
    """Import what any contestant does, so that libraries count for none."""
    import drivetrain.accelerator.accelerator

    del drivetrain
    if way.backend == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", device().type)
        import deepspeed

        del deepspeed
    if installed("accelerate"):
        import accelerate

        del accelerate


def synchronised(step: Step) -> Step:
    """A step that has ended on the device, too."""
    if device().type != "cuda":
        return step

    def waited() -> None:
        step()
        torch.cuda.synchronize()

    return waited


def peak_bytes(peak: PeakRecord) -> int:
    """What model and steps added at most: on the device, or to the process."""
    if peak.device_bytes is not None and peak.device_before_bytes is not None:
        return peak.device_bytes - peak.device_before_bytes
    return peak.host_bytes - peak.host_before_bytes


def highest_of_ranks(value: int) -> int:
    """The highest over ranks."""
    if not dist.is_initialized():
        return value
    highest = torch.tensor(value, device=device())
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest.item())


def run(title: str, way: Way, arguments: argparse.Namespace, contestant: str = "") -> dict[str, list[float]]:
    """Run this script as the ranks of one way."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable]
        if way.num_ranks > 1:  # torchrun's variables would have Accelerate replicate one process
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.num_ranks)]
        command += [sys.argv[0], "--way", title, "--out", str(out)]
        command += ["--rounds", str(arguments.rounds), "--contestant", contestant]
        # glibc's heap keeps holes between large tensors, other ones in each process, which would count as tensors.
        heap = {"MALLOC_MMAP_THRESHOLD_": str(2**16)} if contestant else {}
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **heap})
        return json.loads(out.read_text())


def parse() -> argparse.Namespace:
    """The command line; --way, --out and --contestant are for the script's own processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", default="", help="ways whose title begins so")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Time every way, then measure its memory."""
    arguments = parse()
    if arguments.way:
        measure(ways()[arguments.way], arguments)
        return
    tables: list[Table] = []
    for title, way in ((title, way) for title, way in ways().items() if title.startswith(arguments.only)):
        times = run(title, way, arguments)
        tables.append(Table(title=f"{title}: one step", unit="ms", measured=times))
        peaks: dict[str, list[float]] = {}
        for name in times:
            peaks |= run(title, way, arguments, name)
        tables.append(Table(title=f"{title}: peak memory of a rank", unit="MB", measured=peaks))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    report(f"backends_{kind}" if kind == "cuda" else "backends", tables, arguments)


if __name__ == "__main__":
    main()
