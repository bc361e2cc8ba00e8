"""How the processor time of saves and loads grows with the number of parameters, and that of a plan with ranks.

Run: python benchmarks/growth.py [--parameters 2000 4000 8000] [--tensors 2000 4000] [--ranks 64]
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, TensorName, plan_writes
from drivetrain_weights.tensor_box import Box


def save_and_load(num_parameters: int) -> tuple[float, float]:
    """Return the processor seconds of a save and a load of a model of many small layers, in Adam."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=Path(folder), sections={"run": {"show_plan": False}})
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_parameters // 2)))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=True))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        begun = time.process_time()
        accelerator.save_state()
        saved = time.process_time()
        accelerator.load_state()
        return saved - begun, time.process_time() - saved


def plan(num_tensors: int, num_ranks: int) -> tuple[float, float]:
    """Return the processor seconds and the further MB of the plan of a save of sharded tensors."""
    shape = (2 * num_ranks, 8)
    held: list[dict[TensorName, AvailableBoxes]] = [
        {
            TensorName("model", f"layers.{i}.weight"): AvailableBoxes(
                "F32", 4, shape, (Box((2 * rank, 0), (2, 8)),)
            )
            for i in range(num_tensors)
        }
        for rank in range(num_ranks)
    ]
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    plan_writes(held[0], held)
    spent = time.process_time() - begun
    return spent, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, nargs="*", default=[2000, 4000, 8000])
    parser.add_argument("--tensors", type=int, nargs="*", default=[2000, 4000])
    parser.add_argument("--ranks", type=int, default=64)
    asked = parser.parse_args()
    for number in asked.parameters:
        saved, loaded = save_and_load(number)
        print(f"{number} parameters: save {saved:.1f} s, load {loaded:.1f} s of processor")
    for number in asked.tensors:
        seconds, megabytes = plan(number, asked.ranks)
        print(
            f"{number} tensors on {asked.ranks} ranks: plan {seconds:.1f} s of processor, {megabytes:.0f} MB"
        )


if __name__ == "__main__":
    main()
