"""The network interfaces of this host and their addresses, as Linux shows them."""

import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ROW_BYTES = 40  # a struct ifreq of 64-bit Linux: 16 bytes of name, then a socket address


def addresses_by_interface(proc: Path = Path("/proc")) -> Mapping[str, tuple[str, ...]]:
    """Return the addresses of each interface that has one; empty if the system does not tell (not Linux)."""
    file = proc / "net" / "if_inet6"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    ipv6 = [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows]
    found: dict[str, tuple[str, ...]] = {}
    for name, address in (*_ipv4(), *ipv6):
        found[name] = (*found.get(name, ()), address)
    return found


def interface_names() -> tuple[str, ...]:
    """Return the names of all interfaces, with an address or without."""
    return tuple(name for _, name in socket.if_nameindex())


def _ipv4() -> list[tuple[str, str]]:
    try:
        import array
        import fcntl
    except ImportError:  # not a Unix
        return []
    rows = array.array("B", bytes(_ROW_BYTES * 256))
    address, length = rows.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = struct.pack("iL", length, address)
            used: int = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, packed))[0]
        except OSError:  # the number of this call is Linux's
            return []
    data = rows.tobytes()[:used]
    # A second address of an interface may stand under a label, such as eth0:1.
    return [
        (
            data[start : start + 16].split(b"\0")[0].decode().partition(":")[0],
            socket.inet_ntoa(data[start + 20 : start + 24]),
        )
        for start in range(0, len(data), _ROW_BYTES)
    ]
