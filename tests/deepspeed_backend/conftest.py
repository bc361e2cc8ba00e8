"""DeepSpeed compiles an operator at its first use: once, before any test waits for an answer."""

import subprocess
import sys

import pytest

_COMPILE = (
    "import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
    "ShareMemCommBuilder().load()\n"
)


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> None:
    """Compile what communicates on the CPU, or find it compiled: a minute the first time, seconds from then on."""
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, timeout=170, capture_output=True)
