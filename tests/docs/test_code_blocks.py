"""How the root's conftest.py runs a page's code blocks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_page(folder: Path, *blocks: str, fence: str = "```python") -> subprocess.CompletedProcess[str]:
    """Run a page that is made of these blocks, each of one line, in a pytest of its own."""
    return run_text(folder, "# Page\n" + "".join(f"\n{fence}\n{block}\n```\n" for block in blocks))


def run_text(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a page in a pytest of its own."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "page.md").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "page.md"]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tools")])  # where conftest.py's plugins are
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_blocks_share_a_namespace_in_the_pages_order(tmp_path: Path) -> None:
    done = run_page(tmp_path, "x = 1", "assert x == 1", "assert __name__ == '__main__'")
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_page_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    done = run_page(tmp_path, "import pathlib; pathlib.Path('written').write_text('')")
    assert "1 passed" in done.stdout, done.stdout
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("x = (", "was never closed"),
        ("import warnings; warnings.warn('old', stacklevel=1)", "UserWarning: old"),
        ("open('leaked', 'w')", "unclosed file"),
        (
            "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
            "ZeroDivisionError",
        ),
    ],
)
@pytest.mark.slow
def test_a_block_that_fails_is_one_failed_test(tmp_path: Path, block: str, said: str) -> None:
    done = run_page(tmp_path, block, "y = 1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert said in done.stdout


@pytest.mark.slow
def test_other_blocks_are_not_run(tmp_path: Path) -> None:
    assert "no tests ran" in run_page(tmp_path, "1 / 0", fence="```console").stdout


@pytest.mark.parametrize(
    ("printed", "shown", "outcome"),
    [
        ("1 + 1", "2", "2 passed"),
        ("1 + 1", "3", "1 failed, 1 passed"),
        ("'seconds', 0.123", "seconds ...", "2 passed"),
        ("'seconds', 0.123", "minutes ...", "1 failed, 1 passed"),
    ],
)
@pytest.mark.default_cases("1 + 1-2-2 passed")
def test_text_behind_a_block_is_what_it_prints(
    tmp_path: Path, printed: str, shown: str, outcome: str
) -> None:
    done = run_text(tmp_path, f"# Page\n\n```python\nprint({printed})\n```\n\n```text\n{shown}\n```\n")
    assert outcome in done.stdout, done.stdout


@pytest.mark.slow
def test_text_elsewhere_is_compared_with_nothing(tmp_path: Path) -> None:
    done = run_text(tmp_path, "# Page\n\n```python\nprint(1)\n```\n\nA word.\n\n```text\n2\n```\n")
    assert "2 passed" in done.stdout, done.stdout
