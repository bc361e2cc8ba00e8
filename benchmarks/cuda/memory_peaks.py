"""The most memory of three training steps, of plain torch and each library, and what `record_peak` makes of it.

A GPT in bf16. Contestants follow each other in one process, and each counts from what the allocator holds when it
begins. A dry run measures the process itself.
"""

import gc
from collections.abc import Callable

import torch
from bench import PEERS, Bench, Goal, Table, begin
from gpt import TINY, GPTSize
from gpt_step import gpt_training
from training_loops import Step, makers

from drivetrain_memory import record_peak

STEPS = 3
SIZE = GPTSize(layers=12, sequences=4)


def peaks(bench: Bench, make: Callable[[], Step]) -> tuple[float, float]:
    """Return the bytes that the steps added at most, by `record_peak` and by the allocator's own counter."""
    gc.collect()
    on_card = bench.device.type == "cuda"
    if on_card:
        torch.cuda.empty_cache()
    with record_peak() as peak:
        step = make()
        for _ in range(STEPS):
            step()
        bench.synchronise()
        counter = torch.cuda.max_memory_allocated(bench.device) if on_card else 0
    if not on_card:
        return float(peak.host_bytes - peak.host_before_bytes), 0.0
    assert peak.device_bytes is not None
    assert peak.device_before_bytes is not None
    return float(peak.device_bytes - peak.device_before_bytes), float(counter - peak.device_before_bytes)


def main() -> None:
    """Measure each contestant alone."""
    bench = begin(__doc__ or "", rounds=1)
    training = gpt_training(bench, bench.sized(SIZE, TINY))
    recorded: dict[str, list[float]] = {}
    counted: dict[str, list[float]] = {}
    made = makers(bench, training)
    made["raw torch"]()()  # makes what all share, such as the workspace of products
    for name, make in made.items():
        with bench.attempt(name, ours=name not in PEERS):
            own, allocators = peaks(bench, make)
            recorded[name], counted[name] = [max(own, 1.0)], [allocators]
    goals = [Goal(of="drivetrain", beside="Accelerate", most=1.0)]
    bench.add(Table(title=f"Peak of {STEPS} steps", unit="MB", measured=recorded, goals=goals, digits=3))
    if bench.device.type == "cuda":
        apart = {name: recorded[name][0] - counted[name][0] for name in recorded}
        told = ", ".join(f"{name} {difference:+,.0f}" for name, difference in apart.items())
        bench.tell(f"`record_peak` less torch.cuda.max_memory_allocated, in bytes: {told}.")
    bench.finish()


if __name__ == "__main__":
    main()
