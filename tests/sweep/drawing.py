"""Which cases of a sweep a run tries: all, or a few drawn by the commit."""

import random
import subprocess
from collections.abc import Collection
from pathlib import Path


def drawn_by_commit(names: Collection[str], number: int) -> list[str]:
    """Return some of these names, in their order; another commit has others.

    Args:
        names: Of the cases.
        number: How many to draw.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout
    return sorted(random.Random(commit).sample(list(names), min(number, len(names))))
