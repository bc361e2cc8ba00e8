"""What a commit draws: its hash is the seed, so that the same commit draws the same again, and another one others."""

import random
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

DRAWN = "drawn"  # the word of the command line


@cache
def commit() -> str:
    """The hash of the commit that is tested, which is the seed of every draw."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()


def drawn_by_commit(names: Collection[str], number: int) -> list[str]:
    """Return some of these names, in their order; another commit has others.

    Args:
        names: Of the cases.
        number: How many to draw.
    """
    return sorted(random.Random(commit()).sample(list(names), min(number, len(names))))
