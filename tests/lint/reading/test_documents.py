import json
from pathlib import Path

import pytest

from drivetrain_lint.checker import check_targets
from drivetrain_lint.finding import Finding
from drivetrain_lint.reading.targets import Target
from drivetrain_lint.rules.registry import choose_rules

BAD = (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "if accelerator.is_main_process:\n    accelerator.gather(x)\n"
)


def check(*paths: Path) -> list[Finding]:
    targets = [Target(path=path, shown=path.name) for path in paths]
    return list(check_targets(targets, rules=choose_rules()).findings)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_that_does_not_parse_is_told_with_its_line_and_the_others_are_checked(tmp_path: Path) -> None:
    found = check(write(tmp_path, "a.py", "x = 1\nif x\n    y = 2\n"), write(tmp_path, "b.py", BAD))
    assert [(each.path, each.code, each.line) for each in found] == [
        ("a.py", "DT001", 2),
        ("b.py", "DT101", 4),
    ]
    assert found[0].what.startswith("The file does not parse: expected ':'")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x = '\0'", "does not parse"),
        (b"# coding: nowhere\nx = 1\n", "is no text in a known encoding"),
        (b"x = '\xff'\n", "is no text in a known encoding"),
        (b"(" * 500 + b")" * 500, "does not parse"),
        (b"x = " + b"-" * 100_000 + b"1", "(does not parse|is nested too deeply)"),
        (b"x = " + b"a." * 3_000 + b"b", ""),
    ],
)  # fmt: skip
def test_strange_bytes_are_a_finding_and_no_crash(tmp_path: Path, content: bytes, reason: str) -> None:
    found = check(write(tmp_path, "a.py", content))
    assert [each.code for each in found] in (["DT001"], [])
    assert not reason or any(word in found[0].what for word in reason.strip("()").split("|"))


def test_an_empty_file_and_one_in_latin_1_are_read(tmp_path: Path) -> None:
    latin = "# coding: latin-1\nname = 'é'\n".encode("latin-1") + BAD.encode()
    assert [each.line for each in check(write(tmp_path, "a.py", ""), write(tmp_path, "b.py", latin))] == [6]


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    (found,) = check(tmp_path / "gone.py")
    assert found.what == "The file cannot be read: No such file or directory"


def notebook(*cells: str) -> str:
    listed = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# text"}, *listed], "nbformat": 4})


def test_a_notebook_is_read_as_one_script_and_told_by_cell_and_line(tmp_path: Path) -> None:
    first = (
        "%matplotlib inline\n!pip install x\nfrom accelerate import Accelerator\nfiles = !ls\nAccelerator?\n"
    )
    second = (
        "%%time\naccelerator = Accelerator()\nif accelerator.is_main_process:\n    accelerator.gather(x)\n"
    )
    shell = "%%bash\nfor i in 1 2; do echo $i; done\n"
    (found,) = check(write(tmp_path, "a.ipynb", notebook(first, shell, second)))
    assert (found.code, found.cell, found.line, found.place) == ("DT101", 3, 4, "a.ipynb:cell 3:4:5")
    assert found.source_line == "    accelerator.gather(x)"


def test_a_cell_that_does_not_parse_is_told_by_its_line(tmp_path: Path) -> None:
    (found,) = check(write(tmp_path, "a.ipynb", notebook("x = 1\n", "y = 2\nif y\n")))
    assert (found.code, found.cell, found.line) == ("DT001", 2, 2)


@pytest.mark.parametrize("content", ["no json", "[1]", '{"cells": 3}', '{"worksheets": []}'])
def test_what_is_no_notebook_is_told(tmp_path: Path, content: str) -> None:
    (found,) = check(write(tmp_path, "a.ipynb", content))
    assert found.what.startswith("The file is no notebook")


def test_columns_count_characters(tmp_path: Path) -> None:
    line = "name = 'größe'; y = accelerator.gather(x) if accelerator.is_main_process else 0\n"
    head = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    (found,) = check(write(tmp_path, "a.py", head + line))
    assert line[found.column - 1 : found.end_column - 1] == "accelerator.gather(x)"
