import sys
from pathlib import Path

import pytest

from drivetrain_doctor.host.interfaces import addresses_by_interface, interface_names

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's interfaces")


def test_the_loopback_interface_has_its_address() -> None:
    assert "127.0.0.1" in addresses_by_interface()["lo"]
    assert "lo" in interface_names()


def test_ipv6_addresses_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "fd000000000000000000000000000001 02 40 00 80     eth7\n"
    (tmp_path / "net" / "if_inet6").write_text(row)
    assert addresses_by_interface(tmp_path)["eth7"] == ("fd00::1",)
