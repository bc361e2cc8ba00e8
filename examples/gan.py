"""A GAN: two models with two optimizers, trained against each other, learn a ring of points.

`backward(..., model=...)` says which model a loss belongs to, since one may flow through both. The critic is frozen
while it is passed through, which every backend understands.

python examples/gan.py --steps 2000
drivetrain launch --num-processes 2 --backend fsdp examples/gan.py
drivetrain launch --num-processes 2 --backend fsdp examples/gan.py --resume

--resume goes on from the newest checkpoint in --project-dir, which holds both models, both optimizers and the
position in the data.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator

NOISE = 8


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    """A small multi-layer perceptron."""
    return nn.Sequential(
        nn.Linear(num_inputs, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, num_outputs)
    )


def ring(num_points: int) -> Tensor:
    """Points around the unit circle, of shape (points, 2)."""
    angle = 2 * torch.pi * torch.rand(num_points, 1)
    return torch.cat([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(num_points, 2)


def main() -> None:
    """Train both models in turn on every batch, then say how far generated points lie from the ring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps of each model")
    parser.add_argument("--save-every", type=int, default=200, help="steps of each model between checkpoints")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/gan"), help="where all is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    sections = {"checkpoint": {"save_every_steps": args.save_every}}
    accelerator = Accelerator(seed=0, project_dir=args.project_dir, sections=sections)
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(ring(64 * args.steps * accelerator.num_processes), batch_size=64)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    if args.resume:
        accelerator.load_state()

    for real in loader:  # after load_state: the rest of the data
        noise = torch.randn(len(real), NOISE, device=accelerator.device)
        with accelerator.accumulate(critic):
            fake = generator(noise).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            accelerator.backward(loss, model=critic)
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        with accelerator.accumulate(generator):
            critic.requires_grad_(False)  # this loss flows through it, and must not train it
            loss = F.softplus(-critic(generator(noise))).mean()
            accelerator.backward(loss, model=generator)
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic.requires_grad_(True)
        accelerator.save_if_due()

    with torch.no_grad():
        points = accelerator.gather(generator(torch.randn(500, NOISE, device=accelerator.device)))
    distance = (points.norm(dim=1) - 1).abs().mean().item()
    accelerator.print(f"{len(points)} generated points lie {distance:.3f} from the ring on average")
    accelerator.save_model(generator, args.project_dir / "export")
    accelerator.end_training()


if __name__ == "__main__":
    main()
