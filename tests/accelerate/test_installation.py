import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from types import MappingProxyType

import pytest

import drivetrain_accelerate
from accelerate_programs import run_program
from drivetrain_accelerate import UnknownVersionError
from drivetrain_accelerate.installation import carry_to_spawned, stop_carrying

# Not importorskip, which would take the folder of these tests for it.
found = find_spec("accelerate")
needs_real = pytest.mark.skipif(found is None or found.origin is None, reason="the real one is not installed")


def run(
    *words: str,
    python: str = sys.executable,
    folder: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, since what an import system finds belongs to a process."""
    environment = {**os.environ, **variables}
    command = [python, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def output(code: str) -> str:
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_changes_nothing() -> None:
    found = output(
        "import sys; before = list(sys.meta_path); import drivetrain_accelerate; print(before == sys.meta_path)"
    )
    assert found == "True"


def test_accelerate_is_the_interface_in_the_version_that_it_provides() -> None:
    code = (
        "import drivetrain_accelerate; drivetrain_accelerate.install(); import accelerate, importlib.metadata as m; "
        "print(accelerate.__version__, m.version('accelerate'), m.distribution('accelerate').metadata['Name'], "
        "'accelerate' in m.packages_distributions(), type(accelerate).__module__)"
    )
    assert output(code) == "1.15.0 1.15.0 accelerate True drivetrain_accelerate.interface.interface_module"


def test_other_distributions_are_found_as_before() -> None:
    code = (
        "import drivetrain_accelerate, importlib.metadata as m; before = m.version('torch'); "
        "drivetrain_accelerate.install(); print(before == m.version('torch'))"
    )
    assert output(code) == "True"


@needs_real
@pytest.mark.slow
def test_uninstall_gives_the_real_package_back() -> None:
    code = (
        "import drivetrain_accelerate as d; d.install(); import accelerate; d.uninstall(); print(d.is_installed()); "
        "import accelerate; print(type(accelerate).__name__)"
    )
    assert output(code) == "False\nmodule"


def test_a_second_call_does_nothing() -> None:
    code = "import drivetrain_accelerate as d, sys; d.install(); before = list(sys.meta_path); d.install(); "
    assert output(code + "print(before == sys.meta_path)") == "True"


@needs_real
@pytest.mark.slow
def test_after_the_real_package_was_imported_it_is_refused_by_the_name_of_who_holds_it() -> None:
    done = run("-c", "import accelerate; import drivetrain_accelerate as d; d.install()")
    assert "AlreadyImportedError: accelerate " in done.stderr
    assert "was imported before by __main__" in done.stderr
    assert "python -m drivetrain_accelerate" in done.stderr


def test_a_version_that_is_not_provided_is_refused() -> None:
    with pytest.raises(UnknownVersionError, match=r"version='0\.21\.0'.*provided are 1\.15\.0"):
        drivetrain_accelerate.install(version="0.21.0")
    for wish in (">=1.16", "1.14", "newest"):
        with pytest.raises(UnknownVersionError, match="say one of these, or a requirement"):
            drivetrain_accelerate.install(version=wish)
    assert not drivetrain_accelerate.is_installed()


def test_requirements_of_libraries_hold_for_the_version_that_is_provided() -> None:
    pytest.importorskip("transformers")
    code = (
        "import drivetrain_accelerate as d; [d.install(version=wish) for wish in ('1.15', '>=1.1.0', '~=1.15')]; "
        "from transformers.utils import is_accelerate_available as has; print(has(), has('1.15.0'), has('99'))"
    )
    assert output(code) == "True True False"


def test_strictness_is_that_of_the_last_word_and_ends_with_the_interface() -> None:
    code = (
        "import os, drivetrain_accelerate as d; from drivetrain_accelerate.strictness import is_strict; d.install(); "
        "found = [is_strict()]; d.install(strict=False); found += [is_strict()]; d.uninstall(); "
        "print(*found, is_strict(), [name for name in os.environ if 'STRICT' in name])"
    )
    assert output(code) == "True False True []"


def test_a_module_and_a_name_that_are_not_there_are_named() -> None:
    install = "import drivetrain_accelerate as d; d.install(); "
    assert (
        "No module named 'accelerate.zq' in the interface that drivetrain_accelerate provides"
        in run("-c", install + "import accelerate.zq").stderr
    )


def test_the_nearest_name_is_told_where_there_is_one() -> None:
    code = """
import drivetrain_accelerate as d
d.install()
import accelerate.utils
def told(statement):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(error)
told("from accelerate import Acelerator")
told("from accelerate.utils import set_sed")
told("accelerate.utils.set_sed")
told("import accelerate.util")
told("from accelerate.state import Acceleratr")
told("from accelerate.state import DynamoBackendd")
told("from accelerate.state import main")
told("from accelerate.optimizer import tracking")
told("from accelerate.state import zq")
print(hasattr(accelerate, "Acelerator"))
accelerate.utils.set_sed
"""
    done = run("-c", code)
    assert done.stdout.splitlines() == [
        "cannot import name 'Acelerator' from 'accelerate'; did you mean Accelerator",
        "cannot import name 'set_sed' from 'accelerate.utils'; did you mean set_seed",
        "module 'accelerate.utils', which drivetrain_accelerate provides, has no attribute 'set_sed'; did you mean "
        "set_seed",
        "No module named 'accelerate.util' in the interface that drivetrain_accelerate provides; did you mean "
        "utils",
        "cannot import name 'Acceleratr' from 'accelerate.state'; did you mean AcceleratorState",
        "cannot import name 'DynamoBackendd' from 'accelerate.state'; did you mean DynamoBackend",
        "cannot import name 'main' from 'accelerate.state': it means several things; import that of "
        "accelerate.commands.accelerate_cli or accelerate.commands.config or accelerate.commands.env or "
        "accelerate.commands.estimate or accelerate.commands.launch or accelerate.commands.merge or "
        "accelerate.commands.test",
        "cannot import name 'tracking' from 'accelerate.optimizer': the module is accelerate.tracking",
        "No module named 'accelerate.state.zq' in the interface that drivetrain_accelerate provides, and "
        "accelerate.state has no such name",
        "False",
    ]
    assert done.stderr.strip().endswith("did you mean set_seed")  # and Python adds no suggestion of its own


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["nothere.py"], {}, "can't open file"),
        (["--nostrict", "train.py"], {}, "error: --nostrict: there is no such flag; usage: python -m"),
        (
            ["train.py"],
            {"DRIVETRAIN_RUN__MIXED_PRECISION": "x"},
            "error: run.mixed_precision='x': must be one of",
        ),
    ],
)
def test_what_cannot_be_run_is_told_without_a_traceback(
    words: list[str], variables: dict[str, str], told: str, tmp_path: Path
) -> None:
    done = run("-m", "drivetrain_accelerate", *words, folder=tmp_path, variables=variables)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = "import sys, accelerate\nprint(type(accelerate).__name__, sys.argv[1:], __name__)\n"


def test_a_script_and_a_module_run_with_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    expected = "InterfaceModule ['--lr', '1'] __main__"
    for program in ([str(script)], ["-m", "train"]):
        done = run("-m", "drivetrain_accelerate", *program, "--lr", "1", folder=tmp_path)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_a_command_of_accelerate_runs_as_a_module(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "accelerate.commands.launch", "--dry-run", "--cpu", "--num_processes", "1", "train.py"]
    done = run("-m", "drivetrain_accelerate", *words, python=python, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-m drivetrain_accelerate train.py" in done.stdout


@pytest.mark.slow
def test_a_debugger_finds_the_code_of_a_command_and_nothing_to_do_in_other_modules() -> None:
    code = (
        "import runpy, sys, drivetrain_accelerate as d; d.install(); print(runpy.run_module('accelerate.state')); "
        "sys.argv[1:] = ['--help']; runpy.run_module('accelerate.commands.launch', run_name='__main__')"
    )
    found = output(code)
    assert "'__name__': 'accelerate.state'" in found
    assert "usage: drivetrain accelerate launch" in found


def test_without_a_program_the_usage_is_shown() -> None:
    done = run("-m", "drivetrain_accelerate")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m drivetrain_accelerate [--strict | --no-strict] (SCRIPT |")


def test_an_import_installs_it() -> None:
    assert (
        output("import drivetrain_accelerate.auto, accelerate; print(type(accelerate).__name__)")
        == "InterfaceModule"
    )


@pytest.mark.slow
def test_pytest_installs_it_where_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import accelerate\n\n\ndef test_it():\n    assert type(accelerate).__name__ == 'InterfaceModule'\n"
    )
    plugins = ["-p", "no:cacheprovider", "-p", "drivetrain_accelerate.pytest_plugin"]
    done = run("-m", "pytest", "-q", *plugins, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_spawned_processes_have_the_interface_before_they_import_the_program() -> None:
    found = run_program("with_spawned", ours=True)
    assert found == dict.fromkeys(("here", "spawn", "forkserver"), "drivetrain_accelerate")


def test_what_is_carried_is_taken_back() -> None:
    before = spawn.get_preparation_data
    carry_to_spawned(drivetrain_accelerate.install)
    carry_to_spawned(drivetrain_accelerate.install)
    assert "drivetrain_accelerate" in spawn.get_preparation_data("a")
    stop_carrying()
    stop_carrying()
    assert spawn.get_preparation_data is before
