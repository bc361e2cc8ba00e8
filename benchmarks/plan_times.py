"""The step times that drivetrain_plan predicts beside those of real runs, and whether its first plan is the fastest.

    uv run --group bench python benchmarks/plan_times.py

Each case is a model, its batch and a number of processes over gloo on the CPU, whose rates the processes measure
first. Every plan that keeps the batch without accumulation is trained for some steps, and timed on rank 0.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rounds import RESULTS, found_by_ranks, report

from drivetrain_dispatch.cli.huggingface import read_config
from drivetrain_plan import MODES, RunHardware, find_source, measure_hardware
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.model.huggingface import training_inputs
from drivetrain_plan.planner import measure_model, run_extrapolated
from drivetrain_plan.search.ranking import TrainingPlan, predict
from drivetrain_state import StateSettings, connect

WARM, STEPS = 2, 4
MODE, OPTIMIZER = MODES["fp32"], "adamw-loop"
TEXT = {"vocab_size": 2000, "max_position_embeddings": 512, "use_cache": False}


def _llama(width: int, blocks: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "num_hidden_layers": blocks, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 3 * width, **TEXT, **more,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch.

    Attributes:
        config: The configuration of transformers.
        per_rank: The samples of a rank that reads alone.
        num_tokens: The tokens of a sample.
    """

    config: Mapping[str, Any]
    per_rank: int = 4
    num_tokens: int = 128


MODELS: Mapping[str, Case] = {
    "Llama, 5 M": Case(config=_llama(256, 4)),
    "Llama, 20 M": Case(config=_llama(512, 5)),
    "Llama, 20 M, long": Case(config=_llama(512, 5), per_rank=1, num_tokens=512),
    "Llama, 20 M, one sample": Case(config=_llama(512, 5), per_rank=1),
    "Llama, 50 M": Case(config=_llama(768, 6), per_rank=1),
    "GPT-2, 14 M": Case(
        config={"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 384, "n_layer": 6, "n_head": 8,
                "vocab_size": 2000, "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
        per_rank=2,
    ),
    "BERT, 20 M": Case(
        config={"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 512,
                "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1536, **TEXT},
        per_rank=2,
    ),
    "ViT, 20 M": Case(
        config={"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 96,
                "patch_size": 8, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
                "intermediate_size": 1536},
        per_rank=2,
    ),
}  # fmt: skip
NUM_RANKS = (2, 4)


def choices(case: Case, num_ranks: int) -> list[PlanChoice]:
    """Return the plans of a case, which all train the same samples in a step."""
    batch, found = case.per_rank * num_ranks, list[PlanChoice]()

    def add(**parts: Any) -> None:
        choice = PlanChoice(**parts)
        found.append(replace(choice, micro_batch=batch // choice.num_readers))

    add(data=num_ranks)
    add(shard=num_ranks, strategy="full_shard")
    add(shard=num_ranks, strategy="shard_grad_op")
    add(shard=num_ranks, strategy="full_shard", checkpointing="full")
    add(data=num_ranks // 2, tensor=2)
    if num_ranks > 2:
        add(data=num_ranks // 2, shard=2, strategy="full_shard")
        add(shard=num_ranks // 2, strategy="full_shard", tensor=2)
    return found


def time_plans(folder: Path, case: Case, num_ranks: int) -> dict[str, float]:
    """Train by each plan of a case in this process, one of the ranks; return the seconds of a step by its name."""
    from drivetrain import Accelerator

    found: dict[str, float] = {}
    for choice in choices(case, num_ranks):
        sections = choice.sections()
        sections["run"]["show_plan"] = False
        accelerator = Accelerator(cpu=True, sections=sections)
        transformers, config = read_config(folder)
        torch.manual_seed(0)
        model: Any = getattr(transformers, config.architectures[0])(config).train()
        inputs = training_inputs(model, choice.micro_batch, case.num_tokens)
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        model, optimizer = accelerator.prepare(model, optimizer)
        taken: list[float] = []
        for _ in range(WARM + STEPS):
            torch.distributed.barrier()
            begun = time.perf_counter()
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - begun)
        found[choice.name] = median(taken[WARM:])
        accelerator.end_training()
        del model, optimizer
    return found


def work(arguments: argparse.Namespace) -> None:
    """What each rank does: measure the hardware, then run the cases; rank 0 writes down what it found."""
    num_ranks, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    context = connect(StateSettings(device="cpu"))  # whose group outlives those of the cases
    hardware: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, float]] = {}
    for name, case in chosen(arguments.only):
        rates = arguments.folder / f"rates-{name}-{num_ranks}-{os.environ['RANK']}.json"
        # Before each case, as cores get faster and slower.
        hardware[name] = asdict(measure_hardware(context, cache=rates))
        found[name] = time_plans(arguments.folder / name, case, num_ranks)
        if is_first:
            print(f"{num_ranks} ranks, {name}: {found[name]}", file=sys.stderr, flush=True)
    if is_first:
        arguments.out.write_text(json.dumps({"hardware": hardware, "found": found}))
    torch.distributed.barrier()
    os._exit(0)  # threads of several groups do not survive the interpreter's end


def chosen(only: str) -> list[tuple[str, Case]]:
    """Return the models that the command line asks for."""
    return [(name, case) for name, case in MODELS.items() if re.search(only, name)]


def predict_times(
    folder: Path, case: Case, hardware: RunHardware, wanted: Sequence[PlanChoice]
) -> dict[str, TrainingPlan]:
    """Predict the plans of a case from their programs, by name."""
    from drivetrain_plan.model.layers import num_blocks
    from drivetrain_plan.model.source import BuiltSource
    from drivetrain_plan.program.rank_step import run_rank

    built = BuiltSource(find_source(str(folder)), MODE)
    run = partial(run_rank, built, mode=MODE, num_tokens=case.num_tokens, optimizer=OPTIMIZER)
    pins = {"micro_batch": 1, "tensor": 1, "context": 1}
    model = measure_model(built, MODE, run, num_tokens=case.num_tokens, most_tensor=1, pins=pins)
    counts = num_blocks(built.build())
    return {
        one.name: predict(
            model, one, hardware, in_half=False, figures=run_extrapolated(run, counts, one), basis="program"
        )
        for one in wanted
    }


NOTE = f"""A step of AdamW in fp32 over gloo, all processes on the cores of one CPU; seconds on rank 0, the median of
{STEPS} steps after {WARM}. Predicted from the rank's program and the rates that the same processes measured before
the case. The last table holds, for each case, the first plan by predicted time against the fastest."""


def parse() -> argparse.Namespace:
    """The command line; --folder and --out are for the script's own processes."""
    parser = argparse.ArgumentParser(description="Predicted step times beside real ones.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", default="", help="models whose name has this pattern; by default all")
    for name in ("--folder", "--out"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(rounds=1)
    return parser.parse_args()


def main() -> None:
    """Hold predicted times against real ones, case by case."""
    arguments = parse()
    if arguments.out:
        work(arguments)
        return
    times = ["| case | plan | predicted | measured | ratio |", "|---|---|---:|---:|---:|"]
    best = [
        "| case | first by prediction | its time | fastest | its time | ratio |",
        "|---|---|---:|---|---:|---:|",
    ]
    ratios: list[float] = []
    losses: list[float] = []
    with TemporaryDirectory() as scratch:
        for name, case in MODELS.items():
            (Path(scratch) / name).mkdir()
            (Path(scratch) / name / "config.json").write_text(json.dumps(case.config))
        for num_ranks in NUM_RANKS:
            ran = found_by_ranks(num_ranks, "--folder", scratch, "--only", arguments.only)
            for name, case in chosen(arguments.only):
                hardware = RunHardware(**ran["hardware"][name])
                print(hardware, file=sys.stderr)
                measured: dict[str, float] = ran["found"][name]
                predicted = predict_times(Path(scratch) / name, case, hardware, choices(case, num_ranks))
                for plan, seconds in measured.items():
                    said = predicted[plan].time.seconds
                    ratios.append(seconds / said)
                    times.append(
                        f"| {name}, {num_ranks} ranks | {plan} | {said:.3f} | {seconds:.3f} | {ratios[-1]:.2f} |"
                    )
                    print(times[-1], predicted[plan].time, file=sys.stderr, flush=True)
                first = min(measured, key=lambda plan: predicted[plan].time.seconds)
                fastest = min(measured, key=lambda plan: measured[plan])
                losses.append(measured[first] / measured[fastest])
                best.append(
                    f"| {name}, {num_ranks} ranks | {first} | {measured[first]:.3f} | {fastest} | "
                    f"{measured[fastest]:.3f} | {losses[-1]:.2f} |"
                )
    near = sum(1 / 1.3 <= one <= 1.3 for one in ratios)
    well = sum(one <= 1.1 for one in losses)
    times_said = f"Within 30 %: {near} of {len(ratios)} times."
    said = f"{times_said} First within 10 % of the fastest: {well} of {len(losses)} cases."
    report("plan_times", [], arguments, note="\n\n".join([NOTE, "\n".join(times), "\n".join(best), said]))


if __name__ == "__main__":
    main()
