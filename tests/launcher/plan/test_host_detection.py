import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_launcher import Host
from drivetrain_launcher.plan.host_detection import accelerator_may_exist, detect_host


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "null").touch()
    return tmp_path


def test_a_machine_without_drivers_has_no_accelerator(dev: Path) -> None:
    (dev / "tty0").touch()
    assert not accelerator_may_exist(dev)


@pytest.mark.parametrize("node", ["nvidia0", "kfd", "dri/renderD128", "accel0", "davinci1", "dxg"])
def test_a_driver_leaves_a_mark(dev: Path, node: str) -> None:
    (dev / node).parent.mkdir(exist_ok=True)
    (dev / node).touch()
    assert accelerator_may_exist(dev)


def test_a_system_without_marks_must_be_asked(tmp_path: Path) -> None:
    assert accelerator_may_exist(tmp_path / "nowhere")


def test_the_cpu_asks_nothing() -> None:
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from drivetrain_launcher.plan.host_detection import detect_host; print(detect_host('cpu').accelerator_count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "0\n", done.stderr


def test_a_kind_that_is_not_here_counts_none() -> None:
    host = detect_host("hpu")
    assert isinstance(host, Host)
    assert (host.accelerator, host.accelerator_count) == ("hpu", 0)
