import os
import socket
from dataclasses import replace

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.host.ports import PortMeasurement, judge_port, measure_port
from processes import free_port

TWO = CheckedRun(num_nodes=2, node_rank=0, master_port=29500)


def test_a_port_in_use_is_told_with_its_holder_and_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        measured = measure_port(replace(TWO, master_port=port))
        (finding,) = judge_port(measured, TWO).findings
    assert finding.severity == "error"
    if os.path.exists("/proc/net/tcp"):
        assert finding.what.startswith(f"port {port} is in use, held by process {os.getpid()} (")
    assert f"--master-port {port + 1 if port <= 65000 else 29500} on every host" in finding.repair


def test_a_free_port_is_free() -> None:
    port = free_port()
    measured = measure_port(replace(TWO, master_port=port))
    assert measured.bind_error is None
    assert judge_port(replace(measured, reserved=str(port)), TWO).summary == f"port {port} is free"


def test_any_free_port_needs_no_check() -> None:
    report = judge_port(measure_port(CheckedRun()), CheckedRun())
    assert (report.summary, report.findings) == ("the launcher picks a free port", [])


def test_a_host_without_the_store_says_who_listens() -> None:
    report = judge_port(
        PortMeasurement(port=29500), CheckedRun(num_nodes=2, node_rank=1, master_addr="node0")
    )
    assert report == CheckReport("only node0 listens on a port", is_skipped=True)


@pytest.mark.parametrize(
    ("port", "bind_error", "what", "other"),
    [
        (29500, "EADDRINUSE", "is in use, held by a process that this user may not see", 29501),
        (80, "EACCES", "does not open on this host (EACCES)", 29500),
    ],
)
def test_a_port_of_another_user_or_of_root(port: int, bind_error: str, what: str, other: int) -> None:
    (finding,) = judge_port(PortMeasurement(port=port, bind_error=bind_error), TWO).findings
    assert finding.what == f"port {port} {what}"
    assert f"--master-port {other}" in finding.repair


@pytest.mark.parametrize(
    ("reserved", "count"), [("", 1), ("40000", 0), ("30000-41000,50000", 0), ("40001", 1)]
)
def test_an_ephemeral_port_is_a_risk_unless_reserved(reserved: str, count: int) -> None:
    findings = judge_port(
        PortMeasurement(port=40000, reserved=reserved), replace(TWO, master_port=40000)
    ).findings
    assert [finding.severity for finding in findings] == ["warning"] * count
