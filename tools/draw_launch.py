"""Draw the terminals of launches, as a terminal emulator shows them at the end.

    uv run python tools/draw_launch.py [NAME ...]

It writes docs/images/NAME.svg: `launch`, of two ranks one fails; `plan`, two ranks train; `help`.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte
from rich.console import Console
from rich.text import Text

from drivetrain_config.environ import child_environment

PICTURES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS, ROWS = 113, 60
FAILS = """
import os, sys, time
from tqdm import tqdm

rank = int(os.environ["RANK"])


def take_batch(step):
    if rank == 1 and step == 12:
        raise ValueError("sample 4711 has 256 features, expected 512")


time.sleep(1.0 if rank else 0.0)
for step in tqdm(range(40), desc="epoch 1", disable=rank > 0):
    take_batch(step)
    if rank == 1 and step % 4 == 0:
        print(f"step {step}: loaded shard {step // 4}")
    time.sleep(0.15)
"""
TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

accelerator = Accelerator(project_dir="runs/first", seed=0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(5):
    for x, y in loader:
        accelerator.backward(loss := nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
accelerator.end_training()
"""
TWO_RANKS = "launch --cpu --num-processes 2 train.py"
# The name of a picture -> the command, and train.py.
DRAWN = {"launch": (TWO_RANKS, FAILS), "plan": (TWO_RANKS, TRAINS), "help": ("launch --help", "")}


def draw(words: str, script: str) -> str:
    """Run a command beside train.py in a terminal, and return what it shows at the end as SVG."""
    emulator = pyte.Screen(COLUMNS, ROWS)
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script.lstrip())
        pyte.ByteStream(emulator).feed(_run(folder, words).replace(folder.encode(), b"/home/ada"))
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    rows = [_row(emulator, number) for number in range(ROWS)]
    while not rows[-1].plain.strip():
        rows.pop()
    for row in rows:
        console.print(row, no_wrap=True, highlight=False)
    svg = console.export_svg(title=f"drivetrain {words}")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _run(folder: str, words: str) -> bytes:
    """Return all that the command writes to its terminal."""
    terminal, held = pty.openpty()
    fcntl.ioctl(held, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "drivetrain_launcher", *words.split()],
        cwd=folder,
        env=child_environment(TERM="xterm-256color", OMP_NUM_THREADS="1", COLUMNS=None, NO_COLOR=None),
        stdin=held,
        stdout=held,
        stderr=held,
    )
    os.close(held)
    output = b""
    while True:
        try:
            output += os.read(terminal, 1 << 16)
        except OSError:  # nobody holds the other side any more
            break
    process.wait()
    os.close(terminal)
    return output


def _row(emulator: pyte.Screen, number: int) -> Text:
    """Return a row of the terminal with its colours."""
    row = Text()
    for column in range(COLUMNS):
        cell = emulator.buffer[number][column]
        colour = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else ""
        row.append(cell.data, style=f"{colour} {'bold' if cell.bold else ''}".strip())
    row.rstrip()
    return row


if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        target = PICTURES / f"{name}.svg"
        target.write_text(draw(*DRAWN[name]))
        print(target)
