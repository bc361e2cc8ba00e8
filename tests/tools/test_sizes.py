from pathlib import Path

import pytest

from checks.sizes import check, lengths_and_names, long_files
from checks.sources import parse


def findings_of(text: str, path: str = "packages/a/src/a/module.py"):
    return lengths_and_names(parse(path, text))


def function_of(lines: int) -> str:
    return "def long():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("lines", "hearts", "found"),
    [
        ([400, 400], 0, []),
        ([401, 10], 0, [401]),
        ([600, 400], 1, []),
        ([600, 401], 1, [401]),
        ([601, 600], 1, [601]),
    ],
)
def test_a_file_may_have_400_lines_and_a_packages_heart_600(
    lines: list[int], hearts: int, found: list[int]
) -> None:
    files = [parse(f"packages/a/src/a/module{i}.py", "x = 1\n" * each) for i, each in enumerate(lines)]
    other = parse("packages/b/src/b/module.py", "x = 1\n" * 400)
    findings = long_files([*files, other], hearts=hearts)
    assert [int(finding.message.split()[0]) for finding in findings] == found
    assert all(finding.where.startswith("packages/a/") for finding in findings)


@pytest.mark.parametrize("prefix", ["", "async ", "class A:\n  "])
def test_a_function_may_have_60_lines_and_no_more(prefix: str) -> None:
    def body(lines: int) -> str:
        return prefix + function_of(lines)

    assert findings_of(body(60)) == []
    [finding] = findings_of(body(61))
    assert "long() has 61 lines" in finding.message


def test_a_functions_docstring_is_no_part_of_its_length() -> None:
    described = function_of(60).replace("():\n", '():\n    """Say.\n\n    More.\n    """\n')
    assert findings_of(described) == []


@pytest.mark.parametrize("name", ["utils.py", "_helpers.py", "core/loop.py", "common/__init__.py", "misc.py"])
def test_a_name_that_says_nothing_is_found(name: str) -> None:
    [finding] = findings_of("", f"packages/a/src/a/{name}")
    assert "does not say what the file holds" in finding.message


def test_a_name_that_contains_such_a_word_is_fine() -> None:
    assert findings_of("", "packages/a/src/a/core_count.py") == []


def make_package(root: Path, module: str) -> None:
    folder = root / "packages" / "toy"
    (folder / "src" / "drivetrain_toy").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "drivetrain-toy"\nversion = "1"\n')
    (folder / "src" / "drivetrain_toy" / "__init__.py").write_text("")
    (folder / "src" / "drivetrain_toy" / "settings.py").write_text("import dataclasses\n")
    (folder / "src" / "drivetrain_toy" / "module.py").write_text(module)
    (root / "docs" / "design").mkdir(parents=True)
    (root / "docs" / "design" / "platforms.md").write_text("")
    limits = "all packages have at most 500 lines, and none more than 500\n"
    (root / "docs" / "design.md").write_text(f"| drivetrain-toy | drivetrain_toy | a toy | 500 |\n{limits}")


def test_a_clean_tree_has_no_finding(tmp_path: Path) -> None:
    make_package(tmp_path, "import os\n\nprint(os.sep)\n")
    assert check(tmp_path) == []


def test_a_tree_with_violations_names_each_place(tmp_path: Path) -> None:
    make_package(tmp_path, "import os\n\nprint(os.environ)\n\ndef f():\n    global x\n    x = 1\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "utils.py").write_text("import os\n\nos.environ\n")
    assert [finding.where for finding in check(tmp_path)] == [
        "tools/utils.py",
        "packages/toy/src/drivetrain_toy/module.py:3",
        "packages/toy/src/drivetrain_toy/module.py:6",
    ]
