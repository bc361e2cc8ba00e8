"""The package that docs/howto/write_a_backend.md writes: built from the page, installed, and trained with."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write_a_backend.md"
FILE = re.compile(r"^`(?P<path>[\w./]+)`:\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    """The page's one block of Python that holds `text`."""
    (block,) = [block for block in PYTHON.findall(PAGE.read_text()) if text in block]
    return block


def run(script: str, *arguments: str, python: str, folder: Path, paths: tuple[Path, ...] = ()) -> str:
    """Run Python source in a process of its own, with `paths` on its path; what it printed."""
    file = folder / "script.py"
    file.write_text(script)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRIVETRAIN_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [python, str(file), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel of the page's package is installed."""
    pytest.importorskip(
        "setuptools", reason="the page's package is built with setuptools, which is not installed"
    )
    project, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("installed")
    for found in FILE.finditer(PAGE.read_text()):
        file = project / found["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found["text"])
    run(
        "from setuptools import build_meta; build_meta.build_wheel('dist')",
        python=sys.executable,
        folder=project,
    )
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # all there is to installing a wheel of pure Python
        archive.extractall(target)
    return target


def test_the_page_gives_every_file_of_the_package(installed: Path) -> None:
    files = {file.name for file in installed.rglob("*")}
    assert {"drivetrain_signed.py", "drivetrain_signed-0.1.0.dist-info", "entry_points.txt"} <= files


def test_an_accelerator_trains_with_the_installed_backend_and_its_settings(
    python: str, installed: Path, tmp_path: Path
) -> None:
    script = f"""
import torch
from torch import nn
{block_with("def train(")}
accelerator = Accelerator(backend="signed", cpu=True, sections={{"signed": {{"share": 1.0}}}})
print(train(accelerator).tolist())
(row,) = [row for row in accelerator.plan.rows if row.setting == "signed.share"]
print(row.asked, row.applied, row.read_back, accelerator.plan.facts["backend"])
print(train(Accelerator(backend="signed", cpu=True)).tolist())
"""
    said = run(script, python=python, folder=tmp_path, paths=(installed,)).splitlines()
    assert said == ["[[-0.5, 0.5]]", "1.0 1.0 True SignedBackend", "[[-1.5, 2.0]]"]


def test_the_installed_backend_passes_the_contract(python: str, installed: Path, tmp_path: Path) -> None:
    script = "from drivetrain_signed import SignedBackend\n" + block_with("BackendContract")
    said = run(script, python=python, folder=tmp_path, paths=(installed,))
    assert re.fullmatch(r"\d\d checks passed\n", said)


@pytest.mark.parametrize(("share", "expected"), [("0.5", "[[-1.0, 1.25]]\n"), (None, "[[-1.5, 2.0]]\n")])
@pytest.mark.default_cases("0.5")
def test_a_launched_script_takes_backend_and_settings_from_its_flags(
    python: str, installed: Path, tmp_path: Path, share: str | None, expected: str
) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        f"import torch\nfrom torch import nn\n{block_with('def train(')}\nprint(train(Accelerator()).tolist())\n"
    )
    flags = [] if share is None else ["--signed-share", share]
    command = ["launch", "--num-processes", "1", "--cpu", "--backend", "signed", *flags, str(train)]
    launch = "import sys\nfrom drivetrain_launcher.cli.main import main\nsys.exit(main())\n"
    assert run(launch, *command, python=python, folder=tmp_path, paths=(installed,)).endswith(expected)


def test_a_wrong_setting_of_the_installed_backend_is_refused_with_its_range(
    python: str, installed: Path, tmp_path: Path
) -> None:
    script = """
from drivetrain import Accelerator, ConfigError
try:
    Accelerator(backend="signed", cpu=True, sections={"signed": {"share": 2.0}})
except ConfigError as error:
    print(error)
"""
    assert "share=2.0: must lie between 0 and 1" in run(
        script, python=python, folder=tmp_path, paths=(installed,)
    )


def test_without_the_package_the_name_is_unknown(python: str, tmp_path: Path) -> None:
    script = """
from drivetrain import Accelerator
try:
    Accelerator(backend="signed", cpu=True)
except ValueError as error:
    print(error)
"""
    assert (
        "must be 'auto' or one of 'ddp', 'deepspeed', 'fsdp', 'megatron', 'single', 'xla'; a backend of"
        in run(script, python=python, folder=tmp_path)
    )
