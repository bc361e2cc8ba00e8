"""A training step of a GPT of 354 million parameters in bf16: tokens a second, and MFU as drivetrain tells it."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench import Bench, Goal, Table, begin
from gpt import GPT, TINY, GPTSize
from torch.optim import AdamW
from training_loops import (
    Made,
    Step,
    Training,
    accelerated_step,
    drivetrain_accelerator,
    makers,
    raw_step,
)

WAYS = {"eager": "", "fsdp": ", FSDP2 at one rank", "compiled": ", torch.compile"}
MEASURED = "drivetrain, throughput measured"
WINDOW_STEPS = 10  # of the throughput that drivetrain tells


def gpt_training(bench: Bench, size: GPTSize, *, compiler: str | None = None) -> Training:
    """Return the training of a GPT in bf16 by AdamW, fused."""
    tokens, following = size.batch(bench.device)

    def make() -> Made:
        with bench.device:
            model = GPT(size)
        return model, AdamW(model.parameters(), lr=1e-4, fused=True)

    return Training(
        device=bench.device, make=make, loss=lambda model: model(tokens, following), precision="bf16",
        compiler=compiler,
    )  # fmt: skip


def fully_sharded(training: Training) -> Step:
    """The step of a model under fully_shard by hand, block by block; a group is there already."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, _ = training.make()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    casting = Training(device=training.device, make=training.make, loss=training.loss)  # FSDP casts
    return raw_step(casting, model, AdamW(model.parameters(), lr=1e-4, fused=True))


def fsdp_makers(training: Training) -> dict[str, Callable[[], Step]]:
    """Return what makes the steps under FSDP2; the Accelerator comes first: its group serves plain torch too."""
    accelerator = drivetrain_accelerator(training, backend="fsdp", fsdp={"wrap": ("Block",)})
    return {
        "raw torch": lambda: fully_sharded(training),
        "drivetrain": lambda: accelerated_step(accelerator, training),
    }


def tell_mfu(bench: Bench, size: GPTSize, accelerator: Any, step: Step, peak: float) -> None:
    """Tell the operations and the MFU that drivetrain counts, beside those counted by hand."""
    for _ in range(2 * WINDOW_STEPS + 1):  # on its own: the last window is of these steps alone
        step()
    bench.synchronise()
    found = accelerator.throughput
    if found.mfu is None or found.steps_per_second is None:
        bench.leave_out("MFU", "drivetrain tells none: the card's peak is in no table")
        return
    counted = found.mfu * peak / found.steps_per_second
    by_hand = size.step_flops * found.steps_per_second / peak
    bench.tell(
        f"drivetrain counts {counted / 1e12:.4g} TFLOP a step and tells MFU {100 * found.mfu:.2f} %; by hand "
        f"{size.step_flops / 1e12:.4g} TFLOP, {100 * by_hand:.2f} % at the same {found.steps_per_second:.4g} steps a "
        f"second, of a peak of {peak / 1e12:.4g} TFLOP/s."
    )


def peak_of(device: torch.device) -> float | None:
    """Return the peak of a device in bf16, in FLOP/s; an invented one of a CPU."""
    from drivetrain_throughput import peak_flops

    return peak_flops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else 1e12


def main() -> None:
    """Time the loops."""
    bench = begin(__doc__ or "", rounds=15, more=own_arguments)
    how, size = bench.options.how, bench.sized(GPTSize(), TINY)
    compiler = None if how != "compiled" else bench.sized("inductor", "eager")
    training, peak = gpt_training(bench, size, compiler=compiler), peak_of(bench.device)
    watched: Any = None
    if how == "fsdp":
        making = fsdp_makers(training)
    else:
        making = makers(bench, training)
        if how == "compiled":  # each contestant compiles for a minute
            making.pop("Lightning Fabric", None)
        tracking = {"throughput_every_steps": WINDOW_STEPS, "peak_flops": peak}
        if how == "eager":
            watched = drivetrain_accelerator(training, tracking=tracking)
            making[MEASURED] = partial(accelerated_step, watched, training)
    steps = bench.made(making)
    goals = [
        Goal(of="drivetrain", beside="raw torch", most=1.01),
        Goal(of="drivetrain", beside="Accelerate", most=1.0),
    ]
    rates = {"tokens/s": float(size.num_tokens)}
    if peak is not None:
        rates["MFU by hand, %"] = 100 * size.step_flops / peak
    title = f"A step of {size.num_tokens:,} tokens in bf16, AdamW (fused), clipped{WAYS[how]}"
    table = Table(title=title, unit="ms", measured={}, rates=rates, goals=goals, digits=3)
    bench.measure(table, bench.turns(steps, times=bench.sized(5, 1)))
    if MEASURED in steps and peak is not None:
        tell_mfu(bench, size, watched, steps[MEASURED], peak)
    bench.finish()


def own_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the model trains."""
    parser.add_argument("--how", choices=WAYS, default="eager")


if __name__ == "__main__":
    main()
