"""Which tests a change reaches, in a small workspace and in this one."""

import subprocess
from pathlib import Path

import pytest

from checks.reach import changed_files, reached_tests

ROOT = Path(__file__).parents[2]

FILES = {
    "packages/a/src/a/__init__.py": "from a.low import low as low\nfrom a.high import high as high\n",
    "packages/a/src/a/low.py": "low = 1\n",
    "packages/a/src/a/high.py": "from a.low import low\nhigh = low\n",
    "packages/a/src/a/other.py": "other = 1\n",
    "packages/a/src/a/plugin.py": "import a.other\n",
    "packages/a/src/a/finder.py": "GROUP = 'a.plugins'\n",
    "packages/a/pyproject.toml": '[project]\n[project.entry-points."a.plugins"]\nx = "a.plugin:X"\n',
    "packages/a/README.md": "Text.\n\n```python\nfrom a import high\n```\n",
    "examples/run.py": "from a import low\n",
    "tests/a/conftest.py": "import helper\n",
    "tests/helper.py": "",
    "tests/a/test_low.py": "from a import low\n",
    "tests/a/test_high.py": "def test():\n    from a.high import high\n",
    "tests/a/test_program.py": 'PROGRAM = """\n    import a.other\n    """\n',
    "tests/a/test_finder.py": "from a.finder import GROUP\n",
    "tests/examples/test_run.py": 'EXAMPLE = "run.py"\n',
}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        (
            "packages/a/src/a/low.py",
            [
                "packages/a/README.md",
                "tests/a/test_high.py",
                "tests/a/test_low.py",
                "tests/examples/test_run.py",
            ],
        ),
        ("packages/a/src/a/high.py", ["packages/a/README.md", "tests/a/test_high.py"]),
        ("packages/a/src/a/other.py", ["tests/a/test_finder.py", "tests/a/test_program.py"]),
        ("packages/a/README.md", ["packages/a/README.md"]),
        ("examples/run.py", ["tests/examples/test_run.py"]),
        ("tests/helper.py", [f"tests/a/test_{name}.py" for name in ("finder", "high", "low", "program")]),
        ("tests/a/test_low.py", ["tests/a/test_low.py"]),
        ("packages/a/pyproject.toml", None),
    ],
)
def test_what_imports_a_change_is_reached(workspace: Path, changed: str, reached: list[str] | None) -> None:
    found = reached_tests(workspace, [workspace / changed])
    assert (None if found is None else [str(file.relative_to(workspace)) for file in found]) == reached


@pytest.mark.slow
def test_a_leaf_of_this_workspace_reaches_its_own_tests_alone() -> None:
    found = reached_tests(ROOT, [ROOT / "packages/memory/src/drivetrain_memory/peaks/peak_record.py"])
    assert found is not None
    assert ROOT / "tests/memory/peaks/test_peak_record.py" in found
    assert not [file for file in found if "dispatch" in file.parts]


def test_changes_are_those_since_a_commit_and_new_files(workspace: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=workspace, check=True)
    (workspace / "packages/a/src/a/low.py").write_text("low = 2\n")
    (workspace / "tests/a/test_new.py").write_text("")
    assert changed_files(workspace, "HEAD") == [
        workspace / "packages/a/src/a/low.py",
        workspace / "tests/a/test_new.py",
    ]
    with pytest.raises(ValueError, match="git cannot compare with 'nowhere'"):
        changed_files(workspace, "nowhere")
