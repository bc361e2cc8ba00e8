"""A program that trains with LocalSGD: it prints the weights after each step, and whether ranks hold the same."""

import json
import sys

import torch
from accelerate.local_sgd import LocalSGD
from torch.utils.data import DataLoader

from accelerate import Accelerator


def main() -> None:
    accumulation, every, enabled = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "on"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = DataLoader(torch.arange(72.0).reshape(24, 3) / 72, batch_size=2)  # pyright: ignore[reportArgumentType]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    sums: list[list[float]] = []

    def note() -> None:
        own = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
        sums.append(accelerator.gather(own.sum().reshape(1)).tolist())

    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=enabled) as local:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            note()
    note()
    for batch in data:  # ranks train together again
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    note()
    if accelerator.is_main_process:
        print("FOUND", json.dumps(sums))


if __name__ == "__main__":
    main()
