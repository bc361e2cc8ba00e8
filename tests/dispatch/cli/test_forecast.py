import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.cli.forecast import forecast
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.pipeline_model import Bandwidths

RATES = Bandwidths(to_device=100.0, from_disk=50.0)
LAYERS = [Block(f"layers.{index}", 100, index) for index in range(12)]
PREFILL = {block.name: BlockCost(seconds=5.0, peak_bytes=90, kept_bytes=8) for block in LAYERS}
TOKEN = {block.name: BlockCost(seconds=1.0, peak_bytes=10, kept_bytes=9) for block in LAYERS}


def test_what_fits_stays_and_both_forwards_take_what_they_compute() -> None:
    found = forecast(LAYERS, {0: 2000, "cpu": 500}, RATES, prefill=PREFILL, token=TOKEN)
    assert found.device_map == {"": 0}
    assert (found.prefill_seconds, found.token_seconds) == (60.0, 12.0)
    assert found.device_map.seconds == {"": 12.0}
    held = found.holdings[0]
    parts = (held.weight_bytes, held.moving_bytes, held.kept_bytes, held.activation_bytes)
    assert (*parts, held.peak_bytes) == (1200, 0, 108, 90, 1398)
    assert found.holdings["cpu"].peak_bytes == 0


def test_offloading_costs_a_token_more_than_a_prompt() -> None:
    found = forecast(LAYERS, {0: 500, "cpu": 300}, RATES, prefill=PREFILL, token=TOKEN)
    assert set(found.holdings) == {0, "cpu", "disk"}
    assert found.holdings["disk"].budget_bytes is None
    assert found.holdings["disk"].weight_bytes > 0
    assert found.token_seconds > 12.0
    read = found.holdings["disk"].weight_bytes / RATES.from_disk
    assert found.token_seconds >= read
    assert found.prefill_seconds == pytest.approx(60.0, abs=5.0)  # hidden behind what is computed


@given(st.integers(350, 1500), st.integers(0, 1500), st.integers(0, 3), st.integers(0, 2000))
@pytest.mark.slow
def test_no_device_holds_more_than_it_may(first: int, second: int, tied: int, host: int) -> None:
    blocks = [
        Block(block.name, block.size_bytes, index if index != 11 else tied)
        for index, block in enumerate(LAYERS)
    ]
    try:
        found = forecast(blocks, {0: first, 1: second, "cpu": host}, RATES, prefill=PREFILL, token=TOKEN)
    except DeviceMapError:
        return
    for held in found.holdings.values():
        assert held.budget_bytes is None or held.peak_bytes <= held.budget_bytes
    assert sum(held.weight_bytes for held in found.holdings.values()) == 1200
    assert sum(held.kept_bytes for held in found.holdings.values()) == 12 * 9


def test_a_budget_that_cannot_hold_the_largest_block_is_told() -> None:
    with pytest.raises(DeviceMapError, match=r"'layers.0' takes 100 B, activations up to 90 B, 108 B stay"):
        forecast(LAYERS, {0: 150, "cpu": 10_000}, RATES, prefill=PREFILL, token=TOKEN)
