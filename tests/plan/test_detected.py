from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from drivetrain_plan import measure_hardware
from drivetrain_state import StateSettings, connect

BRIEFLY = patch("drivetrain_plan.detected._SECONDS", 0.01)  # for each rate


@pytest.mark.ranks(2)
def test_all_ranks_know_the_rates_of_the_slowest_and_measure_them_once(tmp_path: Path) -> None:
    with connect(StateSettings(device="cpu")) as context, BRIEFLY:
        cache = tmp_path / f"{context.topology.rank}.json"
        found = measure_hardware(context, held_bytes=10**12, cache=cache)
        assert (found.kind, found.num_hosts, found.devices_per_host) == ("cpu", 1, 2)
        assert found.memory_bytes > 10**12
        assert found.basis == "measured"
        assert 1e8 < found.fp32_flops < 1e14
        assert 1e6 < found.peer_rate < 1e13
        assert 1e-7 < found.latency_seconds < 1
        same: list[object] = [None, None]
        dist.all_gather_object(same, (found.flops, found.peer_rate, found.latency_seconds))
        assert same[0] == same[1]
        assert cache.exists() == context.topology.is_main
        with patch("drivetrain_plan.detected._measure", side_effect=AssertionError("measured again")):
            again = measure_hardware(context, held_bytes=10**12, cache=cache)
        assert again.flops == found.flops


@pytest.mark.slow
def test_one_process_has_no_links_to_measure(tmp_path: Path) -> None:
    with connect(StateSettings(device="cpu")) as context, BRIEFLY:
        found = measure_hardware(context, cache=tmp_path / "rates.json")
    assert found.num_devices == 1
    assert found.memory_rate > 0


def test_a_device_that_does_not_tell_its_memory_is_refused(tmp_path: Path) -> None:
    with (
        connect(StateSettings(device="cpu")) as context,
        patch("drivetrain_plan.detected.free_bytes", lambda _: None),
    ):
        with pytest.raises(ValueError, match="cpu does not say how much memory is free: name a backend"):
            measure_hardware(context, cache=tmp_path / "rates.json")
