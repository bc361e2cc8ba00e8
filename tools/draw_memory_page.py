"""Draw the screenshot of a run's memory page: a real run of a small model, opened in Chromium.

    uv run python tools/draw_memory_page.py

It writes docs/images/memory_page.png. It needs Chromium (`apt-get install chromium`).
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from browser import open_browser
from drivetrain_memory import MemoryTracker, read_summaries, record_activations, write_page

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "memory_page.png"
NUM_RANKS, NUM_STEPS = 2, 30


def track(folder: Path, rank: int) -> None:
    """Train a small model under the tracker, as one rank."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Embedding(8000, 512),
        *(nn.TransformerEncoderLayer(512, 8, dim_feedforward=2048, batch_first=True) for _ in range(2)),
        nn.Linear(512, 8000),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(8000, (4, 64 * (rank + 1)))
    with MemoryTracker(folder, rank=rank, interval_seconds=0.02) as tracker:
        for step in range(NUM_STEPS):
            tracker.step()
            with tracker.phase("forward"):
                loss = model(tokens).float().logsumexp(-1).mean()
            with tracker.phase("backward"):
                loss.backward()
            with tracker.phase("step"):
                optimizer.step()
            if step + 1 < NUM_STEPS:
                optimizer.zero_grad()
            if step % 10 == 9:
                with tracker.phase("save"), tempfile.TemporaryFile() as file:
                    torch.save(model.state_dict(), file)
            time.sleep(0.01)
        with record_activations(model) as recorder:
            model(tokens)
        tracker.record_breakdown(model, optimizer, activations=recorder.memory())


def main() -> None:
    """Run the ranks one after the other, each in a process of its own, and draw their page."""
    if len(sys.argv) == 3:
        track(Path(sys.argv[1]), int(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(NUM_RANKS):
            subprocess.run([sys.executable, __file__, folder, str(rank)], check=True)
        page = write_page(Path(folder) / "memory.html", read_summaries(folder), title="Memory of a run")
        with open_browser(Path(folder)) as browser:
            browser.open(page.as_uri(), width=1000, height=1920)
            browser.screenshot(PICTURE)
    sys.stdout.write(f"{PICTURE}\n")


if __name__ == "__main__":
    main()
