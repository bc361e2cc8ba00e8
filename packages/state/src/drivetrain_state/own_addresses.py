"""The addresses of this machine, found without torch."""

import ipaddress
import socket
from collections.abc import Iterator


def own_addresses(name: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Yield the family and text of each address of a host name, or address, that belongs to this machine."""
    for family, kind, protocol, _, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(place)
            except OSError:
                continue
        yield family, str(place[0])


def is_loopback(name: str) -> bool:
    """Return whether an address reaches only this machine; of host names, only localhost counts."""
    try:
        return name == "localhost" or ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False
