"""What bound cores bring on the CPU: training steps of two ranks of one machine, with and without `--bind auto`.

uv run --group bench python benchmarks/binding.py

Each turn is a launch; the seconds are those of the slower rank's steps, without the start.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rounds import Table, parse_arguments, report, take_turns

DRIVETRAIN = str(Path(sys.executable).parent / "drivetrain")
STEPS = """
import sys, time
import torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
batch = torch.randn(64, 512)

def step():
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()

for _ in range(10):
    step()
accelerator.wait_for_everyone()
start = time.perf_counter()
for _ in range(100):
    step()
seconds = accelerator.gather(torch.tensor([time.perf_counter() - start]))
if accelerator.is_main_process:
    print("seconds", seconds.max().item())
"""


def launched(script: Path, *flags: str) -> Callable[[], float]:
    """A turn: the seconds of the steps under a launch with these flags."""

    def turn() -> float:
        done = subprocess.run(
            [DRIVETRAIN, "launch", "--cpu", "--num-processes", "2", *flags, str(script)],
            check=True,
            capture_output=True,
            text=True,
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
        return float(line.split()[1])

    return turn


def main() -> None:
    """Time both."""
    arguments = parse_arguments(__doc__, rounds=9)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "steps.py"
        script.write_text(STEPS)
        contestants = {
            "drivetrain launch": launched(script),
            "drivetrain launch --bind auto": launched(script, "--bind", "auto"),
        }
        measured = take_turns(contestants, rounds=arguments.rounds)
    report("binding", [Table(title="100 steps of two ranks", unit="s", measured=measured)], arguments)


if __name__ == "__main__":
    main()
