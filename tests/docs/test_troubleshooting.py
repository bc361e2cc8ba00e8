"""The page of symptoms quotes drivetrain's messages, and each of them is what the code says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "troubleshooting.md"


def texts_of(tree: ast.AST) -> list[str]:
    """Return the texts in a file; one with values in it is cut at each value."""
    return [
        " ".join(node.value.split())
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_a_message_on_the_page_is_one_of_the_code() -> None:
    said = "\n".join(
        text for file in ROOT.glob("packages/*/src/**/*.py") for text in texts_of(ast.parse(file.read_text()))
    )
    quoted = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    parts = [part.strip() for block in quoted for part in re.split(r"\.\.\.(?=[ ,;])|\.\.\.$|\n", block)]
    assert [part for part in parts if part not in said] == []
    assert len(quoted) > 10
