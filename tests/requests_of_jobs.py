"""Requests of jobs for the tests of clusters: plain ones, and hostile ones for hypothesis."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from drivetrain_clusters.protocol import JobRequest

# What shells, YAML, Kubernetes, Ray and Slurm give a meaning.
TRAPS = (
    "$(touch /tmp/owned)",
    "`id`",
    "$HOME",
    "${PATH}",
    "$$(X)",
    "$(HOME",
    "; rm -rf /",
    "&& id",
    "| cat",
    "> file",
    "'",
    '"',
    "\\",
    "a\nb: c",
    "--flag",
    "- item",
    "# comment",
    "{a: b}",
    "[1]",
    "&anchor",
    "*alias",
    "!!python/object:os.system",
    "%j",
    "no",
    "Null",
    "~",
    "1e3",
    "0o17",
    "0x1F",
    "1_000",
    "12:30:45",
    "2026-01-01",
    ".inf",
    "=",
    "<<",
    "",
    " ",
    "\t",
    "é\u2028\x85\ufeff\x07",
    "\U0001f600",
)

# No surrogates and no NUL: a process cannot be given them, and submit refuses them for every cluster.
hostile = st.one_of(
    st.sampled_from(TRAPS),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30),
)


def make_request(**changes: Any) -> JobRequest:
    """Return a request of two nodes, with changes."""
    given: dict[str, Any] = {
        "name": "train",
        "command": ("drivetrain", "launch", "train.py", "--lr", "0.1"),
        "folder": Path("/workspace"),
        "num_nodes": 2,
        **changes,
    }
    return JobRequest(**given)
