"""Draw the questions of `drivetrain config` as a user sees them, answered on a terminal of their own.

    uv run python tools/draw_config.py

It writes docs/images/config_question.svg and docs/images/config_written.svg.
"""

import os
import re
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from terminal import DOWN, ENTER, Terminal

PICTURES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS, ROWS = 108, 40
# pyte's names of colours -> rich's.
_COLOURS = {"brightblack": "bright_black", "brown": "yellow", "default": "default"}


def draw(folder: Path) -> dict[str, str]:
    """Answer the questions in a folder, and return the pictures by name."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("DRIVETRAIN_", "SLURM_"))}
    command = [sys.executable, "-m", "drivetrain_launcher", "config"]
    terminal = Terminal(
        command, folder=folder, environment={**kept, "HOME": str(folder)}, columns=COLUMNS, rows=ROWS
    )
    found: dict[str, str] = {}
    try:
        for question, keys in (
            ("How many machines", [ENTER]),
            ("How many processes train", ["2", ENTER]),
            ("How do the processes share", [DOWN]),
            (" » deepspeed", [DOWN]),
            (" » fsdp", []),
        ):
            terminal.wait_for(question)
            terminal.press(*keys)
        found["config_question"] = svg(terminal)
        terminal.press(ENTER)
        for question in ("micro-batches", "Folder of", "Trackers", "newest", "each rank keep", "Keep shards"):
            terminal.wait_for(question)
            terminal.press(ENTER)
        for question in ("Recompute", "Set anything else"):
            terminal.wait_for(question)
            terminal.press(ENTER)
        terminal.end()
        found["config_written"] = svg(terminal)
    finally:
        terminal.close()
    return found


def svg(terminal: Terminal) -> str:
    """Return the screen as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for row in range(len(terminal.text.splitlines())):
        line = Text()
        for column in range(COLUMNS):
            cell = terminal.screen.buffer[row][column]
            style = f"{'bold ' if cell.bold else ''}{_COLOURS.get(cell.fg, cell.fg)}"
            line.append(cell.data, style=style)
        line.rstrip()
        console.print(line, highlight=False, no_wrap=True)
    console.print()  # the last line of the picture loses its underscores
    drawn = console.export_svg(title="drivetrain config")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


if __name__ == "__main__":
    with TemporaryDirectory() as empty:
        for name, picture in draw(Path(empty)).items():
            path = PICTURES / f"{name}.svg"
            path.write_text(picture)
            print(path)
