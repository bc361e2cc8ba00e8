"""Take the picture of `drivetrain track view` for the docs, of real runs of examples/train_bytes.py.

    uv run python tools/shoot_view.py

It trains three short runs and writes docs/images/track_view.png. Training takes a
few minutes of processor time; `--runs FOLDER` keeps the runs there, and takes those that are there already.
"""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import Browser, open_browser
from drivetrain_tracking.view.run_collection import RunCollection
from drivetrain_tracking.view.server import ViewServer

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "track_view.png"
MOST_BYTES = 200_000
_EXAMPLE = ROOT / "examples" / "train_bytes.py"
_RUNS = {"lr-1e-3": "1e-3", "lr-3e-3": "3e-3", "lr-1e-2": "1e-2"}
_THROUGHPUT = {"DRIVETRAIN_TRACKING__THROUGHPUT_EVERY_STEPS": "10"}
_SIZE = ("--width", "64", "--layers", "2", "--batch-size", "8", "--steps", "300", "--save-every", "50")


def train_runs(runs: Path) -> None:
    """Train each run that is not there yet."""
    for name, learning_rate in _RUNS.items():
        folder = runs / name
        if not folder.exists():
            flags = ["--learning-rate", learning_rate, "--project-dir", str(folder), *_SIZE]
            command = [sys.executable, str(_EXAMPLE), *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **_THROUGHPUT})


def shoot(browser: Browser, address: str, picture: Path) -> None:
    """Show the curves with the values under the pointer, and write the picture."""
    browser.open(address, width=1280, height=820)
    browser.wait_for("document.body.dataset.state === 'ready'")
    browser.wait_for("document.querySelectorAll('canvas[aria-label]').length > 5")
    box = browser.evaluate(
        "(() => { const box = document.querySelector('canvas').getBoundingClientRect(); "
        "return [box.left + 0.45 * box.width, box.top + 0.5 * box.height]; })()"
    )
    browser.mouse("mouseMoved", *box)
    browser.screenshot(picture)


def main() -> None:
    """Train, serve and take the picture."""
    parser = argparse.ArgumentParser(description="Take the picture of `drivetrain track view`.")
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where to write the picture")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch) / "runs"
        train_runs(runs)
        collection = RunCollection([runs])
        with ViewServer(collection) as server, collection, open_browser(Path(scratch)) as browser:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            shoot(browser, server.address, arguments.picture)
            server.shutdown()
    size = arguments.picture.stat().st_size
    print(f"{arguments.picture}: {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"the picture has more than {MOST_BYTES:,} bytes: take a smaller window")


if __name__ == "__main__":
    main()
