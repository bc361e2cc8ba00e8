"""The host's time of a training step whose kernels are so small that the host decides."""

import torch
from bench import Goal, Table, begin
from torch import Tensor, nn
from torch.optim import AdamW
from training_loops import Made, Training, makers

LAYERS, WIDTH, ITEMS = 8, 64, 32
MOST_ADDED_SECONDS = 10e-6


def main() -> None:
    """Time the loops."""
    bench = begin(__doc__ or "", rounds=31)
    batch = torch.randn(ITEMS, WIDTH, device=bench.device)

    def make() -> Made:
        layers = [
            layer
            for _ in range(LAYERS)
            for layer in (nn.Linear(WIDTH, WIDTH, device=bench.device), nn.ReLU())
        ]
        model = nn.Sequential(*layers)
        return model, AdamW(model.parameters(), fused=True)

    def loss(model: nn.Module) -> Tensor:
        return model(batch).square().mean()

    steps = bench.made(makers(bench, Training(device=bench.device, make=make, loss=loss)))
    goals = [
        Goal(of="drivetrain", beside="raw torch", most=MOST_ADDED_SECONDS, added=True),
        Goal(of="drivetrain", beside="Accelerate", most=1.0),
    ]
    title = (
        f"A step of {LAYERS} layers of {WIDTH} features: forward, backward, clip, AdamW (fused), zero_grad"
    )
    table = Table(title=title, unit="us", measured={}, goals=goals, digits=3)
    bench.measure(table, bench.turns(steps, times=bench.sized(200, 5)))
    bench.finish()


if __name__ == "__main__":
    main()
