"""Facts of the host, beside the installed Accelerate."""

import os
import socket
from typing import Any

import pytest

from drivetrain_accelerate import host_facts as ours

real: Any = pytest.importorskip("accelerate.utils.environment")
other: Any = pytest.importorskip("accelerate.utils.other")


def test_ranks_of_other_launchers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PMI_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert vars(ours.get_cpu_distributed_information()) == vars(real.get_cpu_distributed_information())
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found = vars(ours.get_cpu_distributed_information())
    assert found == vars(real.get_cpu_distributed_information())
    assert found == {"rank": 3, "world_size": 8, "local_rank": 1, "local_world_size": 2}


def test_modules_and_devices_are_told_as_accelerate_tells_them() -> None:
    names = ("torch", "nope", "numpy", "os")
    assert ours.are_libraries_initialized(*names) == real.are_libraries_initialized(*names)
    assert ours.get_current_device_type() == real.get_current_device_type()
    assert ours.check_cuda_p2p_ib_support() == real.check_cuda_p2p_ib_support()
    before = os.sched_getaffinity(0)
    ours.set_numa_affinity(0)
    assert os.sched_getaffinity(0) == before


def test_ports() -> None:
    assert not ours.is_port_in_use(ours.get_free_port())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert ours.is_port_in_use(port) == other.is_port_in_use(port) is True


def test_an_old_kernel_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    for release, warned in (
        ("5.4.0-26-generic", True),
        ("5.15.0-1", False),
        ("6.1.0+", False),
        ("4.4", True),
    ):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        caplog.clear()
        ours.check_os_kernel()
        assert ("processes may hang" in caplog.text) is warned
