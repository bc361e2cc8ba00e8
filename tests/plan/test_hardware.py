import pytest

from drivetrain_plan.errors import PlanError
from drivetrain_plan.hardware import parse_hardware


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "gigabits"),
    [
        ("80GB", 1, 1, None),
        ("8x80GB h100", 8, 1, None),
        ("8x80GB h100 x 4 hosts 400Gb", 8, 4, 400),
        ("8 x 80GB A100 x 2 nodes", 8, 2, None),
        ("2x8GB cpu x 1 host 100Gbps", 2, 1, 100),
    ],
)
def test_a_description_is_read(text: str, devices: int, hosts: int, gigabits: float | None) -> None:
    found = parse_hardware(text)
    assert (found.devices_per_host, found.num_hosts) == (devices, hosts)
    assert found.num_devices == devices * hosts
    if gigabits is not None:
        assert found.network_rate == gigabits * 1e9 / 8


@pytest.mark.parametrize("text", ["8x80GB h100", "8x80GB h100 x 4 hosts 400Gb", "2x8GB"])
def test_what_is_described_is_read_again(text: str) -> None:
    found = parse_hardware(text)
    again = parse_hardware(found.described())
    assert (again.memory_bytes, again.num_devices, again.network_rate) == (
        found.memory_bytes,
        found.num_devices,
        found.network_rate,
    )


@pytest.mark.parametrize("text", [
        "", "bogus", "8x h100", "8x80GB nothing", "8x80GB h100 x 0 hosts", "0x80GB h100", "8x0GB h100",
        "8x80GB h100 x 4", "8x80GB h100 x 4 hosts 50GB/s", "8x80GB h100 400Gb x 4 hosts", "8x80GB h100 x 2 hosts 0Gb",
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_what_can(text: str) -> None:
    with pytest.raises(PlanError, match="8x80GB h100"):
        parse_hardware(text)


def test_devices_with_links_of_their_own_exchange_faster_than_over_the_bus() -> None:
    assert parse_hardware("8x80GB h100").peer_rate > parse_hardware("8x24GB rtx4090").peer_rate
    assert parse_hardware("2x8GB cpu").overlaps is False
