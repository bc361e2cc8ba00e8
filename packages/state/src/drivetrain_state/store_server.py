"""Host the store at which ranks or nodes meet, on one address, since torch's store listens on every interface."""

import logging
import socket
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore

from drivetrain_state.own_addresses import is_loopback, own_addresses

logger = logging.getLogger(__name__)

_EVERY_INTERFACE = ("::", "0.0.0.0")


def host_store(
    address: str, port: int, *, timeout: timedelta, is_one_node: bool, multi_tenant: bool = False
) -> TCPStore:
    """Return a store whose server runs in this process and listens on `address` alone; port 0 means any free port.

    The server listens on every interface only if other nodes reach this node by an address that this machine lacks:
    an address that a router translates, or a host name that means loopback here. With `multi_tenant`, an existing
    server of this process on the port is shared.
    """
    serve = partial(
        TCPStore, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=multi_tenant
    )
    try:
        for family, own in own_addresses(address):
            # A host name that stands for loopback here stands for another address on the other nodes.
            if is_one_node or is_loopback(address) or not is_loopback(own):
                listener = socket.create_server((own, port), family=family)
                break
        else:
            logger.warning(
                "the store of this run listens on every interface of this machine, as other nodes are to reach it "
                "at %s, which is no address of it; give them one of its addresses to have it listen there alone",
                address,
            )
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            listener = socket.create_server(
                ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
            )
    except (OSError, UnicodeError):  # torch may share its own server, or says what is wrong
        return serve(address, port)
    bound, port = listener.getsockname()[:2]
    host = address if bound not in _EVERY_INTERFACE else "127.0.0.1"  # the way out and back in may be closed
    return serve(host, port, master_listen_fd=listener.detach())  # the store closes it
