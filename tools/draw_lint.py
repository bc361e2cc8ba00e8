"""Draw what `drivetrain lint` says about a script with faults, as it stands in a terminal.

    uv run python tools/draw_lint.py

It writes docs/images/lint.svg.
"""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "lint.svg"
COLUMNS = 112

SCRIPT = """\
import torch
from drivetrain import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
model, optimizer = accelerator.prepare(model, optimizer)


def evaluate():
    return accelerator.gather(model(torch.ones(1, 8))).mean()


for epoch in range(3):
    for x in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.zero_grad()
        optimizer.step()
    if accelerator.is_main_process:
        print(epoch, evaluate())
"""


def draw() -> str:
    """Check a script with faults, and return the command's own output as SVG."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain_launcher", "lint", "train.py"],
            cwd=folder,
            env={**os.environ, "FORCE_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(done.stdout.rstrip()), highlight=False)
    svg = console.export_svg(title="drivetrain lint train.py")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(target)
