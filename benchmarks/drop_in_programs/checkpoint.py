"""A program that saves a model with its AdamW by `save_state` and loads it by `load_state`: seconds, and bytes."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator


def main() -> None:
    """Take one step, save, load, and print what they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    layers = [nn.Linear(1000, 1000) for _ in range(options.millions)]
    model: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(2, 1000)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        accelerator.save_state(folder)
        saved = time.perf_counter()
        accelerator.load_state(folder)
        loaded = time.perf_counter()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    print("FOUND", json.dumps({"save": saved - began, "load": loaded - saved, "bytes": size}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
