"""Whatever plain Python does with a program, running it as main does too: both are run and compared."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

OURS = """
import sys
from drivetrain_launcher.run.runpy_main import run_as_main
is_module = sys.argv[1] == "-m"
run_as_main(sys.argv[1 + is_module], sys.argv[2 + is_module :], is_module=is_module)
"""
SCRIPT = """
import pickle, sys
class Model: pass
print(__name__, __file__, sys.argv, sys.path[0], getattr(__spec__, "name", None), __package__, __cached__)
print(type(__loader__).__name__)
print(sorted(globals()), type(__builtins__), sys.modules["__main__"].Model is Model, len(pickle.dumps(Model())))
match sys.argv[1:]:
    case ["exit", code]: sys.exit(int(code))
    case ["say"]: sys.exit("a last word")
    case ["fail"]: raise ValueError("boom")
    case ["interrupt"]: raise KeyboardInterrupt
    case ["hook"]:
        sys.excepthook = lambda kind, error, traceback: print("hook", kind, error, traceback.tb_lineno)
        raise ValueError("boom")
    case ["cause"]:
        try: {}["x"]
        except KeyError as error: raise RuntimeError("then") from error
    case ["thread"]:
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("late", Model.__module__))).start()
    case ["atexit"]:
        import atexit
        atexit.register(lambda: print("at exit", sys.modules["__main__"].Model))
"""


def without_runpy(shown: str) -> str:
    """Python's own -m leaves two frames of its machinery on a traceback; ours leaves none."""
    return "".join(line for line in shown.splitlines(keepends=True) if "<frozen runpy>" not in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; print(__name__, __file__, sys.argv, sys.path[0])"
    )
    (tmp_path / "package" / "needy.py").write_text("import not_there")
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").write_text("raise ValueError('boom')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(tmp_path / "script.py")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nprint('\xe9')\n".encode("latin-1"))
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as app:
        app.writestr("__main__.py", "import sys; print(__name__, sys.argv, sys.path[0], __package__)")
    return tmp_path


@pytest.mark.default_cases(
    *("script.py exit 7", "script.py fail", "script.py hook", "script.py interrupt", "script.py atexit"),
    *("broken.py", "app.zip x", "m package x", "m package.needy", "m nowhere"),
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py", "--help", "a b", ""],
        ["./script.py"],
        ["elsewhere/link.py"],
        ["script.py", "exit", "7"],
        ["script.py", "say"],
        ["script.py", "fail"],
        ["script.py", "cause"],
        ["script.py", "hook"],
        ["script.py", "interrupt"],
        ["script.py", "thread"],
        ["script.py", "atexit"],
        ["broken.py"],
        ["latin.py"],
        ["package"],
        ["app.zip", "x"],
        ["elsewhere"],
        ["script.py/inside"],
        ["-m", "package", "x"],
        ["-m", "script"],
        ["-m", "package.needy"],
        ["-m", "failing.module"],
        ["-m", "nowhere"],
        ["-m", "package.nowhere"],
    ],
    ids=" ".join,
)
def test_as_python_does(folder: Path, arguments: list[str]) -> None:
    ours = folder / "elsewhere" / "ours.py"
    ours.write_text(OURS)
    expected, found = (
        subprocess.run(
            [sys.executable, *before, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for before in ([], [str(ours)])
    )
    assert found.stdout == expected.stdout
    assert found.stderr == without_runpy(expected.stderr)
    assert found.returncode == expected.returncode
