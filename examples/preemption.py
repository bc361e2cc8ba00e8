"""A job of a cluster that is preempted, or reaches the end of its time, and goes on when it starts again.

drivetrain submit --on slurm --num-nodes 2 --processes-per-node 8 --time 12h --save-seconds 120 examples/preemption.py

Slurm sends SIGTERM 120 seconds before the end, or at a preemption. All ranks then save after the same step and end
with exit code 75. The job is queued again, and the same command goes on from its newest checkpoint, also on another
number of nodes; all of them must see --project-dir. Try it here, with SIGTERM from another shell:

python examples/preemption.py
drivetrain launch --num-processes 2 examples/preemption.py
drivetrain submit --on local --processes-per-node 2 examples/preemption.py
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_checkpoint import NoCheckpointError


def main() -> None:
    """Train from the newest checkpoint on, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--save-minutes", type=float, default=30, help="minutes between checkpoints")
    parser.add_argument(
        "--project-dir", type=Path, default=Path("runs/preemption"), help="where all is written"
    )
    args = parser.parse_args()

    # A preemption without a warning, such as a node that dies, costs what was trained since the last checkpoint.
    sections = {"checkpoint": {"save_every_minutes": args.save_minutes, "keep_last": 2}}
    with Accelerator(seed=0, project_dir=args.project_dir, sections=sections) as accelerator:
        inputs = torch.randn(4096, 8) @ torch.randn(8, 64) / 8**0.5
        loader = DataLoader(inputs, batch_size=64, shuffle=True)
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        try:
            step = accelerator.load_state()
            accelerator.print(f"goes on at step {step}", flush=True)
        except NoCheckpointError:
            step = 0

        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        while step < args.steps:
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step = optimizer.num_steps
            if step % 100 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
            accelerator.save_if_due()  # on SIGTERM or SIGUSR1 it saves, and ends the program

        accelerator.save_state()  # a job that starts once more finds that it is done
        accelerator.save_model(model, args.project_dir / "export")


if __name__ == "__main__":
    main()
