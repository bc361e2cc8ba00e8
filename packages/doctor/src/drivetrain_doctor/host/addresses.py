"""The names and addresses of this host, and of the host where the run's hosts meet."""

import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport

_SLOW_LOOKUP_SECONDS = 1.0
_MOST_LOOKUPS = 64
_PATIENCE_SECONDS = 3.0
_HOSTS_FILE = "write 'ADDRESS NAME' into /etc/hosts on every host"
_SIOCGIFCONF = 0x8912
_ROW_BYTES = 40  # a struct ifreq of 64-bit Linux: 16 bytes of name, then a socket address


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMeasurement:
    """The names and addresses of this host, as the name service gives them.

    Attributes:
        host_addresses: The addresses that the host's name resolves to; empty if it does not resolve.
        own_addresses: The addresses of this host's interfaces, by interface.
        master_addresses: The addresses that the master's name resolves to, in the order of connection attempts.
        outgoing_address: The address of this host from which it would reach the master; None without a route.
        lookup_seconds: The time that the two lookups took together.
        reverse_seconds: The time that reverse lookups of this host's address took, as many at once as ranks join.
    """

    host_name: str
    host_addresses: tuple[str, ...]
    own_addresses: Mapping[str, tuple[str, ...]]
    master_addresses: tuple[str, ...]
    outgoing_address: str | None
    lookup_seconds: float = 0.0
    reverse_seconds: float = 0.0

    @property
    def outgoing_interface(self) -> str | None:
        """The interface that leads to the master."""
        return next((name for name, own in self.own_addresses.items() if self.outgoing_address in own), None)

    @property
    def all_own(self) -> tuple[str, ...]:
        """The addresses of all interfaces."""
        return tuple(address for own in self.own_addresses.values() for address in own)


def measure_addresses(checked: CheckedRun) -> AddressMeasurement:
    """Look up this host's name, the master's, and the name of this host's own address."""
    begin = time.monotonic()
    host_name = socket.gethostname()
    host_addresses, master_addresses = _resolve(host_name), _resolve(checked.master_addr)
    lookup_seconds = time.monotonic() - begin
    outgoing = find_outgoing_address(checked.master_addr)
    own = outgoing or "127.0.0.1"
    # A server that speaks both versions of IP sees an IPv4 client under the second form, which few hosts files have.
    forms = [own] if ":" in own else [own, f"::ffff:{own}"]

    def look_up(form: str) -> None:
        with suppress(OSError):  # having no name is no fault
            socket.getnameinfo((form, 0), 0)

    # A name server may answer one lookup at once, and drop many: torch's clients all ask as they join.
    begin = time.monotonic()
    lookups = [
        threading.Thread(target=look_up, args=(form,), daemon=True)
        for form in forms
        for _ in range(min(_MOST_LOOKUPS, checked.world_size))
    ]
    for lookup in lookups:
        lookup.start()
    for lookup in lookups:
        lookup.join(max(0.0, begin + _PATIENCE_SECONDS - time.monotonic()))
    return AddressMeasurement(
        host_name=host_name,
        host_addresses=host_addresses,
        own_addresses=addresses_by_interface(),
        master_addresses=master_addresses,
        outgoing_address=outgoing,
        lookup_seconds=lookup_seconds,
        reverse_seconds=time.monotonic() - begin,
    )


def find_outgoing_address(name: str) -> str | None:
    """Return this host's source address for connections to a host name or address; None if there is no route."""
    for address in _resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return None


def judge_addresses(measured: AddressMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the names and addresses for a run."""
    report = CheckReport(
        f"{measured.host_name} resolves to {', '.join(measured.host_addresses) or 'no address'}"
    )
    _judge_own_name(report, measured, checked)
    if measured.lookup_seconds > _SLOW_LOOKUP_SECONDS:
        report.warning(
            f"looking up the hosts' names took {measured.lookup_seconds:.1f} s",
            why="each process looks names up as it starts; a name server that does not answer costs 5 s a try",
            repair=f"{_HOSTS_FILE}, or remove the dead name server from /etc/resolv.conf",
            seconds=measured.lookup_seconds,
        )
    if measured.reverse_seconds > _SLOW_LOOKUP_SECONDS:
        report.warning(
            f"reverse lookups of this host's address took {measured.reverse_seconds:.1f} s or more (as many at once "
            "as the run has ranks)",
            why="torch makes such a lookup for each connection, so the ranks join that much later",
            repair=f"{_HOSTS_FILE} (IPv4 also as ::ffff:ADDRESS), or run a caching name server",
            seconds=measured.reverse_seconds,
        )
    if checked.num_nodes > 1:
        report.summary += (
            f"; {checked.master_addr} resolves to {', '.join(measured.master_addresses) or 'no address'}"
        )
        # A name that does not resolve is an error of the rendezvous and of launch.
        if measured.master_addresses:
            _judge_master(report, measured, checked)
    return report


def _judge_own_name(report: CheckReport, measured: AddressMeasurement, checked: CheckedRun) -> None:
    """Judge where gloo listens without GLOO_SOCKET_IFNAME: at the address of this host's own name."""
    if checked.environment.get("GLOO_SOCKET_IFNAME"):
        return
    repair = (
        f"export GLOO_SOCKET_IFNAME={measured.outgoing_interface or 'INTERFACE'} on this host, or write "
        f"'{measured.outgoing_address or 'ADDRESS'} {measured.host_name}' into its /etc/hosts"
    )
    found = measured.host_addresses
    is_one = checked.num_nodes == 1
    judge = report.warning if is_one else report.error
    name = f"this host's own name, {measured.host_name},"
    if not found:
        why = "gloo then gives other hosts the loopback address, which leads each host to itself"
        judge(f"{name} does not resolve", why=why, repair=repair)
    elif all(map(_is_loopback, found)):
        if not is_one:
            debian = " (as Debian's installer writes it)" if "127.0.1.1" in found else ""
            report.error(
                f"{name} resolves to {', '.join(found)}, by /etc/hosts{debian}",
                why="gloo gives that address to other hosts, which leads each host to itself: connectFullMesh "
                "fails, unless this host happens to be the one that connects",
                repair=repair,
            )
    elif _are_foreign(found, measured):
        what = f"{name} resolves to {', '.join(found)}, which none of its interfaces has"
        judge(what, why="gloo cannot listen there and falls back to the loopback address", repair=repair)


def _judge_master(report: CheckReport, measured: AddressMeasurement, checked: CheckedRun) -> None:
    found = measured.master_addresses
    name = f"--master-addr {checked.master_addr}"
    if all(map(_is_loopback, found)) and checked.node_rank != 0:
        report.error(
            f"{name} resolves to {', '.join(found)}, which is this host itself",
            why="each host connects to itself, and all wait until the timeout",
            repair="give the address at which others reach the host with rank 0: hostname -I prints it there",
        )
        return
    every = map(ipaddress.ip_address, measured.all_own)
    own = [each for each in every if not each.is_loopback and not each.is_link_local]
    spoken = {each.version for each in own}
    versions = [ipaddress.ip_address(each).version for each in found]
    if own and spoken.isdisjoint(versions):
        report.error(
            f"{name} has only an IPv{versions[0]} address ({found[0]}), and this host has only "
            f"IPv{min(spoken)} ({own[0]})",
            why="this host cannot connect to the run's store",
            repair=f"give an IPv{min(spoken)} address of the host with rank 0, or give this host IPv{versions[0]}",
        )
    elif own and versions[0] not in spoken:
        report.warning(
            f"{name} resolves to IPv{versions[0]} first, which this host does not have",
            why="each connection tries that address first, and may wait for its timeout",
            repair=f"give the IPv{min(spoken)} address itself, or put IPv4 first in /etc/gai.conf",
        )
    if checked.node_rank == 0 and _are_foreign(found, measured):
        report.warning(
            f"{name} resolves to {', '.join(found)}, which this host, rank 0, does not have",
            why="the other hosts connect there; that is right only behind a service or an address translation (NAT)",
            repair=f"give --master-addr {measured.outgoing_address or 'ADDRESS'} on every host, or this host another "
            "rank",
        )


def _are_foreign(addresses: tuple[str, ...], measured: AddressMeasurement) -> bool:
    """Return whether this host has none of the addresses; False if one is a loopback, or its own are unknown."""
    own = set(measured.all_own)
    return bool(own) and own.isdisjoint(addresses) and not any(map(_is_loopback, addresses))


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def addresses_by_interface(proc: Path = Path("/proc")) -> Mapping[str, tuple[str, ...]]:
    """Return the addresses of each interface that has one; empty if the system does not tell (not Linux)."""
    file = proc / "net" / "if_inet6"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    pairs = [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows]
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import array
        import fcntl  # of Unix alone; the number of the call is Linux's

        room = array.array("B", bytes(_ROW_BYTES * 256))
        address, length = room.buffer_info()
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iL", length, address))
        data = room.tobytes()[: struct.unpack("iL", packed)[0]]
        ipv4 = [data[start : start + _ROW_BYTES] for start in range(0, len(data), _ROW_BYTES)]
        # A second address of an interface may stand under a label, such as eth0:1.
        pairs[:0] = [
            (row.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(row[20:24])) for row in ipv4
        ]
    found: dict[str, tuple[str, ...]] = {}
    for name, address in pairs:
        found[name] = (*found.get(name, ()), address)
    return found
