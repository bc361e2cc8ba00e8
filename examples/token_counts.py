"""Batches of different lengths: what a mean of means gets wrong, and how `count=` puts it right.

Sequences of 10, 1, 2 and 7 tokens, one a micro-batch. The loss that is meant is the mean over all 20 tokens. The
usual loop averages each micro-batch first, and a lone token weighs as much as ten others together.

python examples/token_counts.py
drivetrain launch --num-processes 2 examples/token_counts.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator

LENGTHS = (10, 1, 2, 7)


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of each token: (batch, length, 8) to (batch, length)."""
    return model(tokens).square().squeeze(-1)


def window_gradient(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, *, counted: bool
) -> Tensor:
    """The gradient of one window, all batches of the loader, as an optimizer would see it."""
    for tokens in loader:
        with accelerator.accumulate(model):  # the loader's last batch closes the window
            losses = token_losses(model, tokens)
            if counted:
                accelerator.backward(losses.sum(), count=losses.numel())
            else:
                accelerator.backward(losses.mean())
            accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    return accelerator.unwrap_model(model).weight.grad.clone()


def main() -> None:
    """Compute the same window's gradient in both ways and hold each against the exact one."""
    accelerator = Accelerator(seed=0, gradient_accumulation_steps=len(LENGTHS))
    sequences = [torch.randn(length, 8) for length in LENGTHS]
    model = nn.Linear(8, 1)
    exact_loss = token_losses(model, torch.cat(sequences)).mean()
    (exact,) = torch.autograd.grad(exact_loss, [model.weight])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sequences, batch_size=1))
    for name, counted in (("backward(mean)", False), ("backward(sum, count=n)", True)):
        gradient = window_gradient(accelerator, model, loader, counted=counted)
        error = (gradient - exact.to(gradient.device)).norm() / exact.norm()
        accelerator.print(f"{name}: the gradient is {100 * error.item():.1f} % off")
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
