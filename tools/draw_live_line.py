"""Draw the live line as it stands below the output of a real loop.

    uv run python tools/draw_live_line.py

It writes docs/images/live_line.svg.
"""

import re
import sys
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_throughput.live_line import live_text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "live_line.svg"
NUM_STEPS, PRINT_EVERY, COLUMNS = 120, 40, 132


def draw() -> str:
    """Train a small model, and return its output with the line below as SVG."""
    tracking = {"throughput": True, "peak_flops": 1e11}
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    with Accelerator(cpu=True, sections={"tracking": tracking, "run": {"show_plan": False}}) as accelerator:
        model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(32 * 64, 512), nn.Linear(512, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        texts = [{"input_ids": torch.randint(256, (32,))} for _ in range(NUM_STEPS * 16)]
        loader = DataLoader(texts, batch_size=16)  # pyright: ignore[reportArgumentType] a list is a dataset
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for step, batch in enumerate(loader, start=1):
            loss = (model(batch["input_ids"]) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % PRINT_EVERY == 0:
                console.print(f"step {step}: loss {loss.item():.3f}", highlight=False)
        console.print(live_text(NUM_STEPS, accelerator.throughput), highlight=False, no_wrap=True)
    svg = console.export_svg(title="python train.py")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(target)
