"""A program whose processes, launched from it, tell the settings that they have."""

import json
import tempfile
from pathlib import Path

import torch

from accelerate import Accelerator, notebook_launcher


def written(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    found = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "min").item()
    told = [accelerator.mixed_precision, found]
    Path(folder, str(accelerator.process_index)).write_text(json.dumps(told))
    accelerator.end_training()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook_launcher(written, (folder,), num_processes=2, mixed_precision="bf16")
        print("FOUND", json.dumps([json.loads(Path(folder, rank).read_text()) for rank in "01"]))


if __name__ == "__main__":
    main()
