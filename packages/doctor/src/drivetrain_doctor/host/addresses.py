"""Names and addresses: what this host calls itself, and where the run's hosts are to meet."""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckVerdict, DoctorFinding, error, warning
from drivetrain_doctor.host.interfaces import addresses_by_interface

_SLOW_LOOKUP_SECONDS = 1.0
_MOST_LOOKUPS = 64
_PATIENCE_SECONDS = 3.0
_HOSTS_FILE = "write 'ADDRESS NAME' into /etc/hosts on every host"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMeasurement:
    """The names and addresses of this host, as the name service gives them.

    Attributes:
        host_addresses: The addresses that the host's name resolves to; empty if it does not resolve.
        own_addresses: The addresses of this host's interfaces, by interface.
        master_addresses: The addresses that the master's name resolves to, in the order in which they are tried.
        outgoing_address: The address of this host from which it would reach the master; None without a route.
        lookup_seconds: The time that the two lookups took together.
        reverse_seconds: The time that lookups of this host's own address took, as many at once as ranks join.
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
    """Look up this host's name and the master's."""
    begin = time.monotonic()
    host_name = socket.gethostname()
    host_addresses, master_addresses = _resolve(host_name), _resolve(checked.master_addr)
    lookup_seconds = time.monotonic() - begin
    outgoing = find_outgoing_address(checked.master_addr)
    return AddressMeasurement(
        host_name=host_name,
        host_addresses=host_addresses,
        own_addresses=addresses_by_interface(),
        master_addresses=master_addresses,
        outgoing_address=outgoing,
        lookup_seconds=lookup_seconds,
        reverse_seconds=_reverse_seconds(outgoing or "127.0.0.1", min(_MOST_LOOKUPS, checked.world_size)),
    )


def find_outgoing_address(name: str) -> str | None:
    """Return the address of this host from which it would reach a name or address; None without a way."""
    for address in _resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return None


def judge_addresses(measured: AddressMeasurement, checked: CheckedRun) -> CheckVerdict:
    """Judge the names and addresses for a run."""
    findings = [*_own_name(measured, checked), *_lookup_time(measured)]
    summary = f"{measured.host_name} is {', '.join(measured.host_addresses) or 'no address'}"
    if checked.num_nodes > 1:
        findings += _master(measured, checked)
        summary += f"; {checked.master_addr} is {', '.join(measured.master_addresses) or 'unknown'}"
    return CheckVerdict(summary=summary, findings=tuple(findings))


def _own_name(measured: AddressMeasurement, checked: CheckedRun) -> Iterator[DoctorFinding]:
    """Judge what gloo does without GLOO_SOCKET_IFNAME: it listens where this host's own name leads."""
    if checked.environment.get("GLOO_SOCKET_IFNAME"):
        return
    mend = (
        f"export GLOO_SOCKET_IFNAME={measured.outgoing_interface or 'INTERFACE'} on this host, or write "
        f"'{measured.outgoing_address or 'ADDRESS'} {measured.host_name}' into its /etc/hosts"
    )
    found = measured.host_addresses
    own = measured.all_own
    is_one = checked.num_nodes == 1
    judge = warning if is_one else error
    name = f"this host's own name, {measured.host_name},"
    if not found:
        why = "gloo then offers other hosts the loopback address, where they reach only themselves"
        yield judge(f"{name} does not resolve", why=why, mend=mend)
    elif all(map(_is_loopback, found)):
        if not is_one:
            debian = " (as Debian's installer writes it)" if "127.0.1.1" in found else ""
            yield error(
                f"{name} is {', '.join(found)} in /etc/hosts{debian}",
                why="gloo offers that address to other hosts, where they reach only themselves: connectFullMesh "
                "fails, unless this host happens to be the one that connects",
                mend=mend,
            )
    elif own and not set(own) & set(found) and not any(map(_is_loopback, found)):
        what = f"{name} is {', '.join(found)}, which is no address of its interfaces"
        yield judge(what, why="gloo cannot listen there and falls back to the loopback address", mend=mend)


def _master(measured: AddressMeasurement, checked: CheckedRun) -> Iterator[DoctorFinding]:
    found, own = measured.master_addresses, measured.all_own
    # A name that does not resolve is what the rendezvous check and launch name.
    if not found:
        return
    name = f"--master-addr {checked.master_addr}"
    if all(map(_is_loopback, found)) and checked.node_rank != 0:
        yield error(
            f"{name} is {', '.join(found)}, which is this host itself",
            why="each host looks for the others on itself, and all wait until the timeout",
            mend="say the address of the host with rank 0 as others reach it: hostname -I there prints it",
        )
        return
    yield from _versions(measured, name)
    if checked.node_rank == 0 and own and not set(own) & set(found) and not any(map(_is_loopback, found)):
        yield warning(
            f"{name} is {', '.join(found)}, none of which is an address of this host, rank 0",
            why="the others look for the store there; it is right only behind a service or an address translation",
            mend=f"say --master-addr {measured.outgoing_address or 'ADDRESS'} on every host, or another rank here",
        )


def _versions(measured: AddressMeasurement, name: str) -> Iterator[DoctorFinding]:
    """Judge whether this host speaks the version of IP that the master's addresses have."""
    own = [
        each
        for each in map(ipaddress.ip_address, measured.all_own)
        if not each.is_loopback and not each.is_link_local
    ]
    if not own:
        return
    spoken = {each.version for each in own}
    first, *others = (ipaddress.ip_address(each).version for each in measured.master_addresses)
    if spoken.isdisjoint((first, *others)):
        yield error(
            f"{name} has only an IPv{first} address ({measured.master_addresses[0]}), and this host only "
            f"IPv{min(spoken)} ({own[0]})",
            why="this host has no way to the store",
            mend=f"say an IPv{min(spoken)} address of the host with rank 0, or give this host IPv{first}",
        )
    elif first not in spoken:
        yield warning(
            f"{name} resolves to IPv{first} first, which this host does not have",
            why="each connection tries that address first, and may wait for its timeout",
            mend=f"say the IPv{min(spoken)} address itself, or put IPv4 first in /etc/gai.conf",
        )


def _lookup_time(measured: AddressMeasurement) -> Iterator[DoctorFinding]:
    if measured.lookup_seconds > _SLOW_LOOKUP_SECONDS:
        yield warning(
            f"looking up the hosts' names took {measured.lookup_seconds:.1f} s",
            why="each process looks names up as it starts; a name server that does not answer costs 5 s a try",
            mend=f"{_HOSTS_FILE}, or take the dead name server out of /etc/resolv.conf",
            seconds=measured.lookup_seconds,
        )
    if measured.reverse_seconds > _SLOW_LOOKUP_SECONDS:
        yield warning(
            f"looking up the name of this host's own address took {measured.reverse_seconds:.1f} s or more, with "
            "as many lookups at once as ranks join",
            why="torch looks up the name at the other end of each connection as it is made: joining takes "
            "so much longer",
            mend=f"{_HOSTS_FILE} (IPv4 also as ::ffff:ADDRESS), or run a caching name server",
            seconds=measured.reverse_seconds,
        )


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _reverse_seconds(address: str, count: int) -> float:
    """Return the time of lookups of an address at once, or the patience if they take longer.

    A name server may answer one at once, and drop many: torch's clients ask as they join, each in its process.
    """
    # A server that speaks both versions of IP sees an IPv4 client under the second form, which few hosts files have.
    forms = [address] if ":" in address else [address, f"::ffff:{address}"]

    def look_up(form: str) -> None:
        with suppress(OSError):  # having no name is no fault
            socket.getnameinfo((form, 0), 0)

    begin = time.monotonic()
    lookups = [
        threading.Thread(target=look_up, args=(form,), daemon=True) for form in forms for _ in range(count)
    ]
    for lookup in lookups:
        lookup.start()
    for lookup in lookups:
        lookup.join(max(0.0, begin + _PATIENCE_SECONDS - time.monotonic()))
    return time.monotonic() - begin


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
