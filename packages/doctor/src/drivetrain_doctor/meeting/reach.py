"""The ways from each host to each other host, on ports that the system chose, as for gloo's and NCCL's own."""

import socket
import threading
from collections.abc import Container, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Literal

from drivetrain_doctor.doctor_finding import CheckReport

Reached = Literal["yes", "refused", "no answer", "frozen", "no route"]
# Host that connects, host that listens.
Way = tuple[int, int]

_CONNECT_SECONDS = 3.0
_THREADS = 32
_WORD = b"drivetrain doctor\n"
_SHOWN = 8


@contextmanager
def answer_connections() -> Generator[int]:
    """Answer connections to a port of this host during the block, and yield the port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(
        ("", 0), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
    ) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.settimeout(_CONNECT_SECONDS)
                    connection.sendall(_WORD)

        threading.Thread(target=answer, daemon=True, name="doctor-listener").start()
        try:
            yield server.getsockname()[1]
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def reach_all(addresses: Mapping[int, tuple[str, int]]) -> dict[int, Reached]:
    """Connect to the ports of all other hosts at once; return the outcomes by rank."""

    def reach(place: tuple[str, int]) -> Reached:
        try:
            connection = socket.create_connection(place, timeout=_CONNECT_SECONDS)
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "no answer"
        except OSError:
            return "no route"
        with connection:
            # The kernel of a frozen process's host still accepts.
            try:
                return "yes" if connection.recv(len(_WORD)) else "refused"
            except OSError:
                return "frozen"

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(addresses, threads.map(reach, addresses.values()), strict=True))


def judge_reach(
    ways: Mapping[Way, Reached], silent: tuple[int, ...], names: Mapping[int, str]
) -> CheckReport:
    """Name silent hosts, hosts that no host reaches or that reach no host, then other closed ways."""
    num_open = sum(reached == "yes" for reached in ways.values())
    report = CheckReport(f"{num_open} of {len(ways)} connections between hosts work")
    for rank in silent:
        report.error(
            f"{names[rank]} joined, and then stopped answering",
            why="every collective of a run would wait for it",
            repair=f"check on {names[rank]} that it is alive and its processes run: uptime, dmesg, ps (state T is "
            "stopped, D waits for a disk)",
        )
    answered = {way: reached for way, reached in ways.items() if way[1] not in silent}
    bad = {way: reached for way, reached in sorted(answered.items()) if reached != "yes"}
    closed = _find_hosts_without_ways(answered, bad, end=1)
    mute = [rank for rank in _find_hosts_without_ways(answered, bad, end=0) if rank not in closed]
    for rank in closed:
        how = next(reached for way, reached in bad.items() if way[1] == rank)
        report.error(
            f"no other host can connect to {names[rank]} on an ephemeral port ({how})",
            why="gloo and NCCL connect on such ports, besides that of the rendezvous: the process group waits "
            "until its timeout",
            repair=_open_command(names[rank]),
        )
    for rank in mute:
        report.error(
            f"{names[rank]} can connect to no other host, while the others connect to each other",
            why="gloo and NCCL connect in both directions",
            repair=f"allow outgoing connections on {names[rank]}: iptables -L OUTPUT -n, or its security "
            "group's rules",
        )
    single = [(way, how) for way, how in bad.items() if way[1] not in closed and way[0] not in mute]
    for (one, other), how in single[:_SHOWN]:
        report.error(
            f"{names[one]} cannot connect to {names[other]} ({how})",
            why="gloo and NCCL connect in both directions: the process group waits until its timeout",
            repair=_open_command(names[other], source=names[one]),
        )
    return report


def _find_hosts_without_ways(ways: Iterable[Way], bad: Container[Way], *, end: int) -> list[int]:
    """Return hosts with at least two ways in (end 1) or out (end 0), all of which are closed."""
    own_ways: dict[int, list[Way]] = {}
    for way in ways:
        own_ways.setdefault(way[end], []).append(way)
    return sorted(host for host, own in own_ways.items() if len(own) > 1 and all(way in bad for way in own))


def _open_command(host: str, source: str = "the other hosts") -> str:
    return (
        f"on {host}, allow {source}: iptables -I INPUT -s SUBNET -j ACCEPT, ufw allow from SUBNET, or the security "
        "group's rule for all TCP within the group; or fix the ports with net.ipv4.ip_local_port_range and open those"
    )
