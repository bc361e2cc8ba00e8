"""The port of the rendezvous: free on the host that listens, and outside the system's ephemeral ports."""

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMeasurement:
    """The port of the rendezvous on the host that is to listen.

    Attributes:
        port: The port; 0 for any free one.
        bind_error: The name of the error of an attempt to listen, such as "EADDRINUSE"; None if it worked.
        holder: The process that listens there already, as far as this user may see it.
        ephemeral: The first and the last port that the system gives to outgoing connections.
        reserved: The ephemeral ports that the system does not give out, as the system writes them.
    """

    port: int
    bind_error: str | None = None
    holder: str | None = None
    ephemeral: tuple[int, int] = (32768, 60999)
    reserved: str = ""


def measure_port(checked: CheckedRun, proc: Path = Path("/proc")) -> PortMeasurement:
    """Try to listen on the port for a moment, with IPv4 and, where available, IPv6, as torch's store does."""
    port, failure = checked.master_port, None
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
            probe.listen()
    except OSError as refused:
        failure = errno.errorcode.get(refused.errno or 0, str(refused))
    holder = None
    if failure == "EADDRINUSE":
        tables = [file for name in ("tcp", "tcp6") if (file := proc / "net" / name).exists()]
        rows = [row.split() for file in tables for row in file.read_text().splitlines()[1:]]
        listening = [row for row in rows if row[3] == _LISTENING]
        sockets = {f"socket:[{row[9]}]" for row in listening if int(row[1].rpartition(":")[2], 16) == port}
        for folder in proc.glob("[0-9]*"):
            with suppress(OSError):  # the process ended, or is another user's
                if any(os.readlink(file) in sockets for file in (folder / "fd").iterdir()):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    holder = f"process {folder.name} ({command.strip()[:60]})"
                    break
    limits, reserved = (
        proc / "sys/net/ipv4" / f"ip_local_{name}" for name in ("port_range", "reserved_ports")
    )
    first, last = map(int, limits.read_text().split()) if limits.exists() else (32768, 60999)
    return PortMeasurement(
        port=port,
        bind_error=failure,
        holder=holder,
        ephemeral=(first, last),
        reserved=reserved.read_text().strip() if reserved.exists() else "",
    )


def judge_port(measured: PortMeasurement, checked: CheckedRun) -> CheckReport:
    """Judge the port for a run."""
    if not checked.hosts_store:
        return CheckReport(f"only {checked.master_addr} listens on a port", is_skipped=True)
    port = measured.port
    if port == 0:
        return CheckReport("the launcher picks a free port")
    if measured.bind_error is None:
        report = CheckReport(f"port {port} is free")
        first, last = measured.ephemeral
        reserved = [part.partition("-") for part in measured.reserved.split(",") if part]
        is_reserved = any(int(low) <= port <= int(high or low) for low, _, high in reserved)
        # A cluster derives a port from its job, which may lie anywhere.
        if first <= port <= last and not is_reserved:
            report.warning(
                f"port {port} is in the system's range for outgoing connections ({first}-{last})",
                why="a connection of another program may hold it when a run starts",
                repair=f"choose a port below {first}, such as --master-port 29500, or as root: "
                f"sysctl net.ipv4.ip_local_reserved_ports={port}",
                port=port,
            )
        return report
    end, what = "", f"port {port} does not open on this host ({measured.bind_error})"
    if measured.bind_error == "EADDRINUSE":
        holder = measured.holder or "a process that this user may not see"
        end, what = "end that process, or ", f"port {port} is in use, held by {holder}"
    other = 29500 if port < 1024 or port > 65000 else port + 1
    where = (
        " on every host"
        if checked.num_nodes > 1
        else ", or leave the flag out: the launcher then picks a free port"
    )
    report = CheckReport(f"port {port}")
    report.error(
        what,
        why="the ranks meet at this port, so the run cannot start",
        repair=f"{end}choose --master-port {other}{where}",
        port=port,
    )
    return report
