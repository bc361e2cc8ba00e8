"""Devices that are not here are described by count, size and kind."""

import pytest

from drivetrain_dispatch.planning.hardware import assumed_rates, described, hardware_of


@pytest.mark.parametrize(
    ("text", "sizes", "kind"),
    [
        ("24GB", [24 * 10**9], ""),
        ("2x24GB", [24 * 10**9] * 2, ""),
        ("8x80GB h100", [80 * 10**9] * 8, "h100"),
        ("8 x 80 GiB NVIDIA H100", [80 * 2**30] * 8, "NVIDIA H100"),
        ("2x24GB rtx4090", [24 * 10**9] * 2, "rtx4090"),
        ("1x16GB Tesla-T4", [16 * 10**9], "Tesla-T4"),
    ],
)
def test_a_description_is_count_size_and_kind(text: str, sizes: list[int], kind: str) -> None:
    assert described(text) == (sizes, kind)


@pytest.mark.parametrize("text", ["", "h100", "8x", "x80GB", "8x80", "-1x80GB", "80GB pentium"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no size|is no kind of device"):
        described(text)


def test_a_kind_is_found_by_its_name_alone() -> None:
    assert hardware_of("NVIDIA GeForce RTX 4090") == hardware_of("rtx4090") == hardware_of("4090")
    assert hardware_of("gh200") != hardware_of("h200")
    assert assumed_rates("h100").to_device > assumed_rates("t4").to_device
    assert assumed_rates("no such kind") == assumed_rates("cuda")
