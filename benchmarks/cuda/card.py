"""Name the card that is measured, with its driver; as a program, end with 3 where there is none."""

import shutil
import subprocess
import sys

import torch


def describe(device: torch.device) -> str:
    """Return the card, its memory and its driver, in one line."""
    if device.type != "cuda":
        return "no card: a dry run on the CPU, whose figures say nothing"
    known = torch.cuda.get_device_properties(device)
    driver = f"driver {driver_version()}, CUDA {torch.version.cuda}"
    return f"{known.name}, {known.total_memory / 2**30:.0f} GiB, {driver}"


def driver_version() -> str:
    """Return what nvidia-smi says, or that it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi)"
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return (answer.stdout.splitlines() or ["unknown"])[0].strip()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(3)
    print(describe(torch.device("cuda", 0)))
