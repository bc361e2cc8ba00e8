"""The whole idea in one loop: a plain PyTorch script, on one device or many.

python examples/minimal.py
drivetrain launch --num-processes 2 examples/minimal.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

accelerator = Accelerator(seed=0)

inputs = torch.randn(256, 8)
targets = inputs.sum(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(5):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

accelerator.print(f"loss {loss.item():.6f} on {accelerator.num_processes} process(es)")
accelerator.end_training()
