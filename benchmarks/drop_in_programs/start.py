"""A program that imports Accelerate, makes an Accelerator and prepares a model; with `--raw` it imports torch alone.

It prints its CPU seconds from the start of the interpreter, and those of construction and preparation in them.
"""

import json
import sys
import time

import torch


def main() -> None:
    """Start as every program does, and print what it took."""
    found = {"construct": 0.0}
    if "--raw" not in sys.argv:
        from accelerate import Accelerator

        began = time.process_time()
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))
        found["construct"] = time.process_time() - began
    print("FOUND", json.dumps({**found, "start": time.process_time()}))


if __name__ == "__main__":
    main()
