"""Each row of the table "Where it differs" has a test in this folder, by the first cell, and each test a row."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs" / "howto" / "drop_in.md"


def rows() -> list[list[str]]:
    """Return the cells of the table's rows."""
    behind = PAGE.read_text(encoding="utf-8").partition("| what | Accelerate | here |")[2]
    table = behind.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def rows_of_tests() -> set[str]:
    """Return the docstrings of the tests, which are the first cells of their rows."""
    found: set[str] = set()
    for file in set(FOLDER.glob("test_*.py")) - {Path(__file__)}:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add((ast.get_docstring(node) or f"{file.name}: {node.name} names no row").strip())
    return found


def test_each_row_has_a_test_and_each_test_a_row() -> None:
    assert {cells[0] for cells in rows()} == rows_of_tests()


def test_each_row_says_whether_it_can_be_restored() -> None:
    for cells in rows():
        assert len(cells) == 4, cells
        assert cells[3].partition(":")[0] in ("restored", "no", "–"), cells
