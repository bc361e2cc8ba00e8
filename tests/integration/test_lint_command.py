import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_launcher.cli.main import main

ROOT = Path(__file__).parents[2]
BAD = (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "if accelerator.is_main_process:\n    accelerator.gather(x)\n"
)


@pytest.fixture(autouse=True)
def in_a_folder_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text("print(1)\n")


def test_a_clean_script_exits_with_0_and_a_faulty_one_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "good.py"]) == 0
    assert capsys.readouterr().out == "1 file, nothing found\n"
    assert main(["lint", "good.py", "bad.py"]) == 1
    assert "bad.py:4:5 error DT101" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "SCRIPT is missing"),
        (["gone.py"], "gone.py: no such script, folder or module"),
        (["bad.py", "--select", "DT7"], "DT7: no such rule"),
        (["bad.py", "--format", "xml"], "say one of text, json, sarif, github"),
        (["bad.py", "--output", "no/such/folder.json"], "--output no/such/folder.json: cannot be written"),
    ],
)
def test_a_mistake_in_the_command_line_exits_with_2(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", *tokens]) == 2
    assert message in capsys.readouterr().err


def test_rules_are_selected_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "bad.py", "--ignore", "DT101,DT2"]) == 0
    assert main(["lint", "bad.py", "--select", "DT2"]) == 0
    assert main(["lint", "bad.py", "--select", "DT1, DT303"]) == 1
    assert capsys.readouterr().out.count("DT101") == 1


def test_an_output_file_leaves_a_count_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", ".", "--format", "json", "--output", "found.json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "drivetrain: 2 files, 1 error, written to found.json\n"
    assert json.loads((tmp_path / "found.json").read_text())["files"] == 2


def test_colours_follow_the_variables_that_ask_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["lint", "bad.py"])
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["lint", "bad.py"])
    assert "\x1b[" not in capsys.readouterr().out


def test_nothing_of_a_script_runs_and_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("import pathlib\npathlib.Path('ran').write_text('')\n")
    source = (
        "import sys; from drivetrain_launcher.cli.main import main; code = main(['lint', 'trap.py', 'trap'])\n"
        "print(code, [name for name in sys.modules if name.startswith('torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_script_is_checked_in_a_fraction_of_a_second_of_one_core() -> None:
    command = [sys.executable, "-m", "drivetrain_launcher", "lint", str(ROOT / "examples" / "train_bytes.py")]
    used: list[float] = []
    for _ in range(3):
        before = _children_seconds()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        used.append(_children_seconds() - before)
    assert min(used) < 0.9  # 0.25 on an idle machine


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
