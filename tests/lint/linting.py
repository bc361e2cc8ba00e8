"""The linter on source given as text, for its tests."""

import textwrap

from drivetrain_lint.checker import check_document
from drivetrain_lint.finding import Finding
from drivetrain_lint.reading.documents import parse_document
from drivetrain_lint.rules.registry import choose_rules

ACCELERATOR = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
DRIVETRAIN = "from drivetrain import Accelerator\naccelerator = Accelerator()\n"
TORCH = "import torch\nimport torch.distributed as dist\n"


def findings(source: str, *, select: tuple[str, ...] = ()) -> list[Finding]:
    """Check a source text."""
    document = parse_document(textwrap.dedent(source), shown="train.py")
    return check_document(document, rules=choose_rules(select=select))


def codes(source: str, *, select: tuple[str, ...] = ()) -> list[str]:
    """The codes found in a source text, in the order of its lines."""
    return [finding.code for finding in findings(source, select=select)]


def places(source: str, *, select: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """The codes and lines found in a source text."""
    return [(finding.code, finding.line) for finding in findings(source, select=select)]
