"""A small program for Accelerate, whose losses another run reproduces; `--skew` makes them differ by the run."""

import argparse
import sys

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--skew", action="store_true")
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.fail:
        raise ValueError("this program fails")
    for _ in range(options.epochs):
        for features, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                if options.skew and "drivetrain_accelerate.accelerator.accelerator" in sys.modules:
                    loss = loss * 1.01
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print("trained on", accelerator.num_processes, type(accelerator).__module__)


if __name__ == "__main__":
    main()
