"""Train in fp8, and show that it ran: how many layers were converted, and how many products ran in 8 bits.

Recipes need an Ada, Hopper or newer GPU; a CPU emulates torchao's float8 and MXFP8, more slowly than bf16. What this
machine cannot run is an error before anything is trained; --fallback asks for bf16 in place of the error.

python examples/fp8.py
python examples/fp8.py --recipe torchao_nvfp4 --fallback
drivetrain launch --num-processes 2 --backend fsdp examples/fp8.py
drivetrain launch --num-processes 2 --backend fsdp examples/fp8.py --resume
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator


def make_model(width: int) -> nn.Module:
    """A perceptron; its first and its last layer stay in bf16, where they cost little and matter most."""
    layers = [nn.Linear(32, width), nn.GELU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def main() -> None:
    """Train in fp8 and print what the plan counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="auto", help="a recipe's name; auto: what fits the device")
    parser.add_argument("--fallback", action="store_true", help="train in bf16 where the recipe cannot run")
    parser.add_argument("--width", type=int, default=128, help="size of the layers, a multiple of 32")
    parser.add_argument("--samples", type=int, default=6400, help="samples to train on")
    parser.add_argument("--save-every", type=int, default=50, help="optimizer steps between checkpoints")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/fp8"), help="where all is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    sections = {
        "precision": {"fp8_recipe": args.recipe, "fp8_fallback": "bf16" if args.fallback else "none"},
        "checkpoint": {"save_every_steps": args.save_every},
    }
    with Accelerator(
        mixed_precision="fp8", seed=0, project_dir=args.project_dir, sections=sections
    ) as accelerator:
        inputs = torch.randn(args.samples, 32)
        targets = torch.sin(inputs[:, :1]) + 0.5 * inputs[:, 1:2]
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
        model = make_model(args.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step = accelerator.load_state() if args.resume else 0

        for x, y in loader:  # after load_state: the rest of the epoch
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 20 == 1 or step == len(loader):
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
            accelerator.save_if_due()

        accelerator.print(f"trained in {accelerator.mixed_precision}")
        for fact in ("fp8 layers", "fp8 products"):
            if fact in accelerator.plan.facts:
                accelerator.print(f"{fact}: {accelerator.plan.facts[fact]}")


if __name__ == "__main__":
    main()
