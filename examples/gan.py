"""Two models trained against each other: a GAN that learns a ring of points.

`backward(..., model=...)` says which model a loss belongs to, since one may flow through both. The critic is frozen
while it is passed through, which every backend understands.

python examples/two_models.py --steps 2000
drivetrain launch --num-processes 2 --backend fsdp examples/two_models.py
"""

import argparse

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
    args = parser.parse_args()

    accelerator = Accelerator(seed=0)
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(ring(64 * args.steps), batch_size=64)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    for real in loader:
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

    with torch.no_grad():
        points = accelerator.gather(generator(torch.randn(500, NOISE, device=accelerator.device)))
    distance = (points.norm(dim=1) - 1).abs().mean().item()
    accelerator.print(f"{len(points)} generated points lie {distance:.3f} from the ring on average")
    accelerator.end_training()


if __name__ == "__main__":
    main()
