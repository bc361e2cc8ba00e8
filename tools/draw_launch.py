"""Draw the terminal of a launch with two ranks, of which one fails, as a terminal emulator shows it.

    uv run python tools/draw_launch.py

It writes docs/images/launch.svg.
"""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "launch.svg"
COLUMNS, ROWS = 104, 40
WORDS = ("launch", "--cpu", "--num-processes", "2", "train.py")
SCRIPT = """
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


def draw() -> str:
    """Run the launch in a terminal, and return what it shows at the end as SVG."""
    emulator = pyte.Screen(COLUMNS, ROWS)
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT.lstrip())
        pyte.ByteStream(emulator).feed(_run(folder).replace(folder.encode(), b"/home/ada"))
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    rows = [_row(emulator, number) for number in range(ROWS)]
    while not rows[-1].plain.strip():
        rows.pop()
    for row in rows:
        console.print(row, no_wrap=True, highlight=False)
    svg = console.export_svg(title=f"drivetrain {' '.join(WORDS)}")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _run(folder: str) -> bytes:
    """Return all that the launch writes to its terminal."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "drivetrain_launcher", *WORDS])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    output = b""
    while True:
        try:
            output += os.read(terminal, 1 << 16)
        except OSError:  # nobody holds the other side any more
            break
    os.waitpid(pid, 0)
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
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(target)
