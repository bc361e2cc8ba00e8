"""Fixtures that every package's tests share: pools of connected processes, and scripts run on several ranks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

from optional_modules import is_installed

# Hundreds of processes start here. Where Python is told to keep no bytecode, each would compile torch for 3 seconds:
# theirs is kept beside the sources, out of sight.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "bytecode"))

# The lanes share the cores: the threads of more than one lane's operators would wait for each other in busy loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where transformers imports Comet, it would begin experiments of what later tests of the process log to MLflow.
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"

# Machines differ and are shared: no example has a deadline, the whole test has pytest's. Each run draws other
# examples, so that few of them in every run find what many in one would.
settings.register_profile("drivetrain", deadline=None, max_examples=30)
settings.load_profile("drivetrain")

_COMPILE_SECONDS = 300
_COMPILE = (
    "import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
    "ShareMemCommBuilder().load()\n"
    "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()\n"
)


def compiled_mark() -> Path:
    """The file that says that these versions' operator is compiled: to ask DeepSpeed takes its import, 6 seconds."""
    versions = "-".join(f"{name}-{version(name)}" for name in ("deepspeed", "torch"))
    return Path(os.environ["TORCH_EXTENSIONS_DIR"]) / f"{versions}-py{sys.version_info.minor}"


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Begin to compile DeepSpeed's operator, which takes a minute the first time, while the lanes run other tests."""
    asked = any(Path(name).name in ("tests", "deepspeed") for name in config.args)
    if asked and is_installed("deepspeed") and not compiled_mark().exists():
        command = [sys.executable, "-c", _COMPILE, compiled_mark()]
        compiler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        config.add_cleanup(compiler.wait)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests with DeepSpeed's operator the time to compile it: the first of them waits for the compiler."""
    for item in items:
        if "deepspeed_operators" in getattr(item, "fixturenames", ()) and not item.get_closest_marker(
            "timeout"
        ):
            item.add_marker(pytest.mark.timeout(_COMPILE_SECONDS + 180))


@pytest.fixture(autouse=True, scope="module")
def environment_as_before() -> Iterator[None]:
    """Remove the variables that libraries leave behind: with them no process could be forked, see preloaded.py."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """DeepSpeed's operator, compiled before any test waits for an answer; tells why if it does not compile."""
    if not compiled_mark().exists():
        command = [sys.executable, "-c", _COMPILE, compiled_mark()]
        subprocess.run(command, check=True, timeout=_COMPILE_SECONDS, capture_output=True)
