import re
from pathlib import Path

import pytest

from drivetrain_config import Layers
from drivetrain_config.source import Entry, Kind, Source
from drivetrain_launcher import LaunchError
from drivetrain_launcher.cli.preflight import check_backend, check_device, check_module, misplaced_flags

KNOWN = ("--num-processes", "--processes-per-node", "--backend")
FLAG = Source("command line", "--backend")
INSTALLED = ("single", "ddp", "fsdp", "deepspeed")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--num-processes", "2"), ["--num-processes"]),
        (("--num_processes=2", "--num_processes=3"), ["--num_processes"]),
        (("--nproc_per_node", "2", "--lr", "1", "--backend", "fsdp"), ["--nproc_per_node", "--backend"]),
        (("--lr", "1", "num-processes", "--num-processes-x"), []),
        (("--", "--num-processes", "2"), []),
    ],
)
def test_flags_of_the_launcher_after_the_script_are_told_once(
    arguments: tuple[str, ...], told: list[str]
) -> None:
    script = "print(accelerator.num_processes, accelerator.backend)"
    assert misplaced_flags(arguments, KNOWN, script) == told


@pytest.mark.parametrize(
    "own", ["add_argument('--num_processes')", "'num-processes'", "num_processes: int", "(num_processes=1)"]
)
def test_a_flag_that_the_script_names_is_its_own(own: str) -> None:
    assert misplaced_flags(("--num-processes", "2"), KNOWN, own) == []


@pytest.mark.parametrize("script", ["print('trains')", None])
def test_a_misspelt_backend_is_refused_with_the_nearest(script: str | None) -> None:
    message = r"run.backend='fspd': .* did you mean 'fsdp'\? say one of auto, ddp, .*; from --backend on the command"
    with pytest.raises(LaunchError, match=message):
        check_backend("fspd", INSTALLED, script, FLAG)


def test_a_backend_that_nothing_resembles_is_refused_where_the_script_does_not_name_it() -> None:
    with pytest.raises(
        LaunchError, match=r"run\.backend='mine': there is no such backend; say one of auto, ddp"
    ):
        check_backend("mine", INSTALLED, "print('trains')", FLAG)
    check_backend("mine", INSTALLED, "registry = register_backend('mine', Mine)", FLAG)
    check_backend("mine", INSTALLED, None, FLAG)  # a module, which may import what registers it


def test_backends_that_are_there_and_auto_pass() -> None:
    for name in (*INSTALLED, "auto"):
        check_backend(name, INSTALLED, "", FLAG)
    check_backend("fspd", (), "", FLAG)  # the launcher alone is installed: the workers know


def said(kind: Kind, cpu: bool, device: str, of_device: Kind | None = None) -> Layers:
    return Layers(
        {
            ("run", "cpu"): (Entry(cpu, Source(kind, "--cpu")),),
            ("state", "device"): (Entry(device, Source(of_device or kind, "--state-device")),),
        }
    )


def test_cpu_beside_another_device_names_both_with_their_sources() -> None:
    message = (
        "run.cpu=True (from --cpu on the command line) contradicts state.device='cuda' (from --state-device on the "
        "command line); keep one of the two"
    )
    with pytest.raises(LaunchError, match=re.escape(message)):
        check_device(said("command line", True, "cuda"))


def test_cpu_on_the_command_line_overrides_a_device_in_a_file() -> None:
    check_device(said("command line", True, "cuda", of_device="file"))
    check_device(said("command line", True, "cpu"))
    check_device(said("command line", False, "cuda"))
    check_device(Layers({}))


@pytest.mark.parametrize("name", ["json.tool", "sys", "mine", "folder.inner", "mine.unknown"])
def test_a_module_that_is_installed_or_in_the_folder_passes(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    (tmp_path / "folder").mkdir()
    check_module(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.run", "-m trian.run: there is no module trian in .*; did you mean train.run"),
        ("nothing_like_it", "there is no module nothing_like_it in .* nor one that is installed$"),
        ("train.py", "-m train.py: this is a script, not a module; leave out -m"),
        ("", "there is no module"),
    ],
)
def test_a_module_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(LaunchError, match=message):
        check_module(name, tmp_path)
