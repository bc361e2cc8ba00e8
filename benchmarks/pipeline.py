"""Stages of a pipeline: a step against torch.distributed.pipelining by hand, and waits against their simulation.

    uv run --group bench python benchmarks/pipeline.py

Over gloo on the CPU, a thread a rank. Two ranks train one Llama of 10 million parameters by 1F1B, in as many
micro-batches. Four ranks train blocks that sleep: as long in each stage, so that more ranks than cores compute at a
time. Of their time it tells the share in which they do not sleep, beside the share in which the simulated schedule
waits. The picture of the docs is one of these steps, from the spans of torch's profiler.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_models import Step, llama
from rounds import RESULTS, Goal, Table, found_by_ranks, repeated, report, take_turns
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD, AdamW
from torch.profiler import ProfilerActivity, profile

from drivetrain import Accelerator, ParallelDims
from drivetrain_parallel.stages.schedules import SCHEDULES, Timed, bubble, plan_order, simulate

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "pipeline.svg"
PIECES, ITEMS, TOKENS = 8, 16, 128
SLEEPS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
SECOND_STAGE = 5  # its first layer: the head counts as three
RANKS, SLEEP_PIECES = 4, 8
SECONDS = 0.08  # of a forward through one of two blocks a rank; a backward takes twice as long
DRAWN = ("1f1b", "interleaved_1f1b")
Spans = Sequence[tuple[str, int, int, float, float]]  # kind, stage, micro-batch, start and end


def make() -> tuple[nn.Module, Tensor]:
    """The model and its one batch, the same on all ranks."""
    torch.manual_seed(0)
    model = llama()
    return model, torch.randint(model.config.vocab_size, (ITEMS, TOKENS))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class HalfLlama(nn.Module):
    """What an expert writes to hold one of two stages of a Llama."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(layers[:SECOND_STAGE] if rank == 0 else layers[SECOND_STAGE:])
        self.norm, self.head = (model.model.norm, model.lm_head) if rank == 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states from tokens, or logits from hidden states."""
        states = x if self.embed is None else self.embed(x)
        positions = self.rotary(states, torch.arange(states.shape[1])[None])
        for layer in self.layers:
            states = layer(states, attention_mask=None, position_embeddings=positions)
        return states if self.head is None or self.norm is None else self.head(self.norm(states))


def by_hand() -> Step:
    """PipelineStage and Schedule1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, x = make()
    rank = dist.get_rank()
    part = HalfLlama(model, rank)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PIECES, loss_fn=next_token_loss)
    optimizer = AdamW(part.parameters())

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def prepared() -> Step:
    """The documented loop of drivetrain, on the whole model."""
    accelerator = accelerator_of(2, "1f1b", PIECES, splits=[f"model.layers.{SECOND_STAGE}"])
    model, x = make()
    model, _ = accelerator.prepare(model, AdamW(model.parameters()))

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        return next_token_loss(model(tokens).logits, tokens)

    return lambda: accelerator.train_step(x, loss=loss_of).loss.item()


def accelerator_of(
    num_ranks: int, schedule: str, num_pieces: int, splits: list[str] | None = None
) -> Accelerator:
    """An Accelerator whose ranks hold the stages of one model."""
    dims = ParallelDims(
        pipeline=num_ranks,
        pipeline_schedule=schedule,
        pipeline_micro_batches=num_pieces,
        pipeline_splits=splits,
    )
    return Accelerator(backend="single", parallelism=dims, cpu=True, sections={"run": {"show_plan": False}})


class Sleep(Function):
    """Sleep in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the tensor later."""
        del ctx
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient later."""
        del ctx
        time.sleep(2 * SECONDS)
        return gradient


class SleepingBlock(nn.Module):
    """A block that computes next to nothing, and takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        return Sleep.apply(self.linear(x))


class SleepingModel(nn.Module):
    """Two such blocks for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(2 * RANKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of what the last block returns."""
        for block in self.blocks:
            x = block(x)
        return x.mean()


def sleep_by(schedule: str, num_rounds: int) -> list[Spans]:
    """What this rank did in each round, but for waits, in seconds since a time that all ranks share."""
    accelerator = accelerator_of(RANKS, schedule, SLEEP_PIECES)
    model = SleepingModel()
    model, _ = accelerator.prepare(model, SGD(model.parameters()))
    found: list[Spans] = []
    for number in range(1 + num_rounds):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            accelerator.train_step(torch.ones(SLEEP_PIECES, 8), loss=lambda model, x: model(x))
        if number:
            found.append(spans_of(profiler))
    return found


def spans_of(profiler: profile) -> Spans:
    """The actions in a trace, each from the end of its wait."""
    results: Any = profiler.profiler
    begin = results.kineto_results.trace_start_ns() * 1e-9
    marks: Any = profiler.events()
    waits = [one.time_range for one in marks if one.name.startswith("wait for stage")]
    found: list[tuple[str, int, int, float, float]] = []
    for mark in marks:
        said = re.fullmatch(r"(\w+) of stage (\d+) on micro-batch (\d+)", mark.name)
        if said is not None:
            span = mark.time_range
            ready = [one.end for one in waits if span.start <= one.start and one.end <= span.end]
            start = max([span.start, *ready])
            found.append(
                (said[1], int(said[2]), int(said[3]) - 1, begin + start * 1e-6, begin + span.end * 1e-6)
            )
    return sorted(found, key=lambda one: one[3])


def simulated(schedule: str) -> tuple[tuple[Timed, ...], ...]:
    """What each rank would do, and when, if it waited for nothing but what stages hand on."""
    kind = SCHEDULES[schedule]
    blocks = 2 / kind.stages_per_rank
    seconds = {"forward": blocks * SECONDS, "backward": 2 * blocks * SECONDS}
    order = plan_order(kind, RANKS, SLEEP_PIECES)
    return simulate(order, RANKS * kind.stages_per_rank, seconds)


def waiting_share(by_rank: Sequence[Spans]) -> float:
    """The share of the ranks' time in which they do not sleep."""
    total = max(one[4] for spans in by_rank for one in spans) - min(
        one[3] for spans in by_rank for one in spans
    )
    return 1 - 2 * 3 * SECONDS * SLEEP_PIECES / total


def measure(arguments: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes it down."""
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    found: Any
    if dist.get_world_size() == 2:
        steps = {"torch, PipelineStage by hand": by_hand(), "drivetrain, pipeline": prepared()}
        losses = torch.tensor([[step() for step in steps.values()] for _ in range(2)])
        dist.broadcast(losses, 1)
        if (losses[1, 0] - losses[1, 1]).abs() > 1e-3:
            raise RuntimeError(f"after one step contestants train differently: {losses.tolist()}")
        turns = {name: repeated(step, times=1, before=dist.barrier) for name, step in steps.items()}
        found = take_turns(turns, rounds=arguments.rounds, shown=is_first)
    else:
        found = {}
        for schedule in SLEEPS:
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, sleep_by(schedule, 3))
            found[schedule] = list(zip(*every, strict=True))  # of each round: the spans of the ranks
            if is_first:
                print(schedule, [waiting_share(one) for one in found[schedule]], file=sys.stderr, flush=True)
    if is_first:
        arguments.out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of several groups do not survive the interpreter's end


def draw(panels: Mapping[str, Sequence[Spans]]) -> str:
    """An SVG of what ranks do at a time: a row for each rank, forwards light, backwards dark, second stages green."""
    longest = max(one[4] for rows in panels.values() for spans in rows for one in spans)
    scale, row, top = 860 / longest, 22, 26
    height = len(panels) * (RANKS * row + top + 12)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="940" height="{height}" font-family="sans-serif" '
        'font-size="11">'
    ]
    colours = {
        ("forward", 0): "#9fc5e8",
        ("backward", 0): "#3b6ea8",
        ("forward", 1): "#b6d7a8",
        ("backward", 1): "#6aa66a",
    }
    for place, (title, rows) in enumerate(panels.items()):
        y = place * (RANKS * row + top + 12)
        parts.append(f'<text x="4" y="{y + 17}" font-size="13">{escape(title)}</text>')
        for rank, spans in enumerate(rows):
            at = y + top + rank * row
            parts.append(f'<text x="4" y="{at + 14}">rank {rank}</text>')
            parts.append(
                f'<rect x="56" y="{at}" width="{longest * scale:.1f}" height="{row - 3}" fill="#eeeeee"/>'
            )
            for kind, stage, piece, start, end in spans:
                x, width = 56 + start * scale, (end - start) * scale
                fill = colours[kind, stage // RANKS]
                text = "#fff" if kind == "backward" else "#222"
                parts.append(
                    f'<rect x="{x:.1f}" y="{at}" width="{width:.1f}" height="{row - 3}" fill="{fill}" '
                    f'stroke="#fff"/><text x="{x + width / 2:.1f}" y="{at + 13}" text-anchor="middle" '
                    f'fill="{text}">{piece + 1}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


def from_zero(by_rank: Sequence[Spans]) -> list[Spans]:
    """The spans of ranks, from the begin of the first."""
    begin = min(one[3] for spans in by_rank for one in spans)
    return [[(*one[:3], one[3] - begin, one[4] - begin) for one in spans] for spans in by_rank]


def parse() -> argparse.Namespace:
    """The command line; --out is for the script's own processes."""
    parser = argparse.ArgumentParser(description="Stages of a pipeline against torch's, and their waits.")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file the picture is written to")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Time the step, measure waits, and draw two of the schedules."""
    arguments = parse()
    if arguments.out:
        measure(arguments)
        return
    times = found_by_ranks(2, "--rounds", str(arguments.rounds))
    hand, own = times
    table = Table(
        title="one step of a Llama in two stages, two ranks",
        unit="ms",
        measured=times,
        rates={"tokens/s": ITEMS * TOKENS},
        goals=[Goal(of=own, beside=hand, most=1.05)],
    )
    slept = found_by_ranks(RANKS)
    lines = ["| schedule | simulated | measured | ratio |", "|---|---:|---:|---:|"]
    panels: dict[str, Sequence[Spans]] = {}
    for schedule in SLEEPS:
        rounds = slept[schedule]
        expected, found = bubble(simulated(schedule)), statistics.median(map(waiting_share, rounds))
        lines.append(f"| {schedule} | {expected:.3f} | {found:.3f} | {found / expected:.2f} |")
        if schedule in DRAWN:
            panels[f"{schedule}, simulated"] = [
                [(*one.action, one.start, one.end) for one in spans] for spans in simulated(schedule)
            ]
            panels[f"{schedule}, measured"] = from_zero(rounds[0])
    arguments.picture.write_text(draw(panels))
    note = (
        f"The share of {RANKS} ranks' time in which they wait, of {SLEEP_PIECES} micro-batches and blocks that take "
        f"{SECONDS} s: what a rank\nsleeps in an action is known, all else is waiting, sends over gloo included. "
        "Goal: within 15 % of the simulated share."
    )
    report("pipeline", [table], arguments, note="\n\n".join([note, "\n".join(lines)]))


if __name__ == "__main__":
    main()
