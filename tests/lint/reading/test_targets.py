from pathlib import Path

import pytest

from drivetrain_lint.errors import LintArgumentError
from drivetrain_lint.reading.targets import find_targets


def test_files_folders_and_modules_are_found_once_each(tmp_path: Path) -> None:
    scripts = ("train.py", "deep/er/model.py", "deep/notes.ipynb", "tool/__init__.py", "tool/run.py")
    skipped = (".hidden/x.py", "deep/__pycache__/x.py", "deep/.venv/x.py", "deep/site-packages/x.py")
    for name in (*scripts, *skipped, "deep/data.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    names = ("train.py", "./train.py", "deep", "tool.run", "tool")
    found = [target.path.relative_to(tmp_path).as_posix() for target in find_targets(names, base=tmp_path)]
    assert found == ["train.py", "deep/er/model.py", "deep/notes.ipynb", "tool/run.py", "tool/__init__.py"]


def test_an_installed_module_is_found_without_importing_it() -> None:
    (found,) = find_targets(("json.tool",), base=Path("/"))
    assert found.path.name == "tool.py"


@pytest.mark.parametrize("name", ["nowhere.py", "no.such.module", "json.nothing", "sys", "-x-"])
def test_a_name_for_nothing_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LintArgumentError, match="no such script, folder or module"):
        find_targets((name,), base=tmp_path)


def test_a_file_that_is_no_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(
        LintArgumentError, match=r"data.csv: is no script; say a file ending in .py or .ipynb"
    ):
        find_targets(("data.csv",), base=tmp_path)
