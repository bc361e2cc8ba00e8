import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.addresses import (
    AddressMeasurement,
    addresses_by_interface,
    find_outgoing_address,
    judge_addresses,
    measure_addresses,
)

HEALTHY = AddressMeasurement(
    host_name="node1",
    host_addresses=("10.0.0.2",),
    own_addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",)},
    master_addresses=("10.0.0.1",),
    outgoing_address="10.0.0.2",
)
TWO = CheckedRun(num_nodes=2, node_rank=1, master_addr="node0", master_port=29500)


def whats(measured: AddressMeasurement, checked: CheckedRun = TWO) -> list[tuple[str, str]]:
    return [(finding.severity, finding.what) for finding in judge_addresses(measured, checked).findings]


def test_healthy_names_have_no_finding() -> None:
    report = judge_addresses(HEALTHY, TWO)
    assert report.findings == []
    assert report.summary == "node1 resolves to 10.0.0.2; node0 resolves to 10.0.0.1"


def test_debians_own_name_breaks_several_hosts_and_not_one() -> None:
    measured = replace(HEALTHY, host_addresses=("127.0.1.1",))
    (finding,) = judge_addresses(measured, TWO).findings
    assert finding.severity == "error"
    assert finding.what.endswith(
        "node1, resolves to 127.0.1.1, by /etc/hosts (as Debian's installer writes it)"
    )
    assert "export GLOO_SOCKET_IFNAME=eth0 on this host" in finding.repair
    assert "'10.0.0.2 node1' into its /etc/hosts" in finding.repair
    assert whats(measured, CheckedRun()) == []
    named = replace(TWO, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert whats(replace(HEALTHY, host_addresses=()), named) == []


ETH0_WITH_LINK_LOCAL = {"eth0": ("10.0.0.2", "fe80::1")}
NO_IPV6 = "--master-addr node0 has only an IPv6 address (fd00::1), and this host has only IPv4 (10.0.0.2)"


@pytest.mark.parametrize(
    ("changes", "checked", "found"),
    [
        ({"host_addresses": ()}, TWO, ("error", "this host's own name, node1, does not resolve")),
        ({"host_addresses": ()}, CheckedRun(), ("warning", "this host's own name, node1, does not resolve")),
        (
            {"host_addresses": ("10.9.9.9",)}, TWO,
            ("error", "this host's own name, node1, resolves to 10.9.9.9, which none of its interfaces has"),
        ),
        (
            {"master_addresses": ("127.0.0.1", "::1")}, TWO,
            ("error", "--master-addr node0 resolves to 127.0.0.1, ::1, which is this host itself"),
        ),
        (
            {}, replace(TWO, node_rank=0),
            ("warning", "--master-addr node0 resolves to 10.0.0.1, which this host, rank 0, does not have"),
        ),
        ({"master_addresses": ("fd00::1",)}, TWO, ("error", NO_IPV6)),
        ({"master_addresses": ("fd00::1",), "own_addresses": ETH0_WITH_LINK_LOCAL}, TWO, ("error", NO_IPV6)),
        (
            {"master_addresses": ("fd00::1", "10.0.0.1")}, TWO,
            ("warning", "--master-addr node0 resolves to IPv6 first, which this host does not have"),
        ),
    ],
)  # fmt: skip
def test_names_and_addresses_that_lead_elsewhere(
    changes: dict[str, object], checked: CheckedRun, found: tuple[str, str]
) -> None:
    assert whats(replace(HEALTHY, **changes), checked) == [found]  # type: ignore[arg-type]


def test_slow_name_servers_are_told_with_the_time() -> None:
    (finding,) = judge_addresses(replace(HEALTHY, lookup_seconds=10.2), TWO).findings
    assert finding.what == "looking up the hosts' names took 10.2 s"
    (finding,) = judge_addresses(replace(HEALTHY, reverse_seconds=3.0), TWO).findings
    assert finding.what.startswith("reverse lookups of this host's address took 3.0 s or more")
    assert "/etc/hosts" in finding.repair


def test_a_name_that_does_not_resolve_here_is_found() -> None:
    measured = measure_addresses(replace(TWO, master_addr="no-such-host.invalid"))
    assert measured.master_addresses == ()
    assert whats(replace(HEALTHY, master_addresses=())) == []  # the rendezvous says so
    assert measured.host_name == socket.gethostname()


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's interfaces")
def test_interfaces_are_seen_with_their_addresses(tmp_path: Path) -> None:
    measured = measure_addresses(CheckedRun())
    assert "127.0.0.1" in measured.own_addresses["lo"]
    assert measured.outgoing_interface == "lo"
    (tmp_path / "net").mkdir()
    row = "fd000000000000000000000000000001 02 40 00 80     eth7\n"
    (tmp_path / "net" / "if_inet6").write_text(row)
    assert addresses_by_interface(tmp_path)["eth7"] == ("fd00::1",)


def test_a_name_without_a_way_has_no_outgoing_address() -> None:
    assert find_outgoing_address("no-such-host.invalid") is None
    assert find_outgoing_address("127.0.0.1") == "127.0.0.1"
