import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, TCPStore

from drivetrain_state.own_addresses import is_loopback, own_addresses
from drivetrain_state.store_server import host_store
from processes import free_port

SECONDS = timedelta(seconds=20)


def reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("is_one_node", [True, False])
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_store_listens_on_its_address_alone(address: str, is_one_node: bool) -> None:
    store = host_store(address, 0, timeout=SECONDS, is_one_node=is_one_node)
    client = TCPStore(address, store.port, timeout=SECONDS, wait_for_workers=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert not reached("127.0.0.2", store.port)  # another address of this machine's


def test_a_store_that_others_reach_by_a_foreign_address_listens_everywhere_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = host_store("192.0.2.1", 0, timeout=SECONDS, is_one_node=False)  # as if a router translated it
    store.set("key", "value")
    assert reached("127.0.0.2", store.port)
    assert (
        "listens on every interface of this machine, as other nodes are to reach it at 192.0.2.1"
        in caplog.text
    )


def test_a_name_that_is_loopback_on_this_machine_alone_is_no_address_for_other_nodes() -> None:
    lines = [line.split() for line in Path("/etc/hosts").read_text().splitlines()]
    names = [name for line in lines if line and line[0].startswith("127.") for name in line[1:]]
    private = next((name for name in names if not is_loopback(name)), None)
    if private is None:
        pytest.skip("wants a name for loopback in /etc/hosts besides localhost")
    assert reached("127.0.0.3", host_store(private, 0, timeout=SECONDS, is_one_node=False).port)
    assert not reached("127.0.0.3", host_store(private, 0, timeout=SECONDS, is_one_node=True).port)


def test_a_process_shares_the_server_that_it_has_on_a_port() -> None:
    port = free_port()
    first, second = (
        host_store("127.0.0.1", port, timeout=SECONDS, is_one_node=True, multi_tenant=True) for _ in range(2)
    )
    first.set("key", "value")
    assert second.get("key") == b"value"
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        host_store("127.0.0.1", port, timeout=SECONDS, is_one_node=True)


def test_own_addresses_are_told_from_those_of_others() -> None:
    assert list(own_addresses("127.0.0.1")) == [(socket.AF_INET, "127.0.0.1")]
    assert not list(own_addresses("192.0.2.1"))
    assert [is_loopback(name) for name in ("127.0.1.1", "::1", "localhost", "10.0.0.1", "node0")] == [
        True, True, True, False, False,
    ]  # fmt: skip
