import math
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from drivetrain_memory import SamplerSettings
from drivetrain_memory.usage.device_drivers import DriversFound
from drivetrain_memory.usage.device_reading import DeviceReading
from drivetrain_memory.usage.sampler import UsageSampler


def test_a_row_has_a_number_for_each_column_and_children_are_summed() -> None:
    with subprocess.Popen(
        [sys.executable, "-ISc", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        sampler = UsageSampler(settings=SamplerSettings(children_seconds=0.001))
        row = sampler.sample()
        assert row is not None
        numbers = dict(zip(sampler.columns, row, strict=True))
        expected = psutil.Process().memory_info().rss
        assert numbers["host/resident_bytes"] == pytest.approx(expected, rel=0.1)
        assert numbers["children/count"] >= 1
        assert numbers["children/resident_bytes"] > 2**20
        child.communicate(b"\n")
        assert sampler.sample() is not None  # the child is gone meanwhile
    sampler.close()


def test_another_process_is_seen_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE) as child:
        sampler = UsageSampler(child.pid, drivers=DriversFound(drivers=(), absent={}))
        row = sampler.sample()
        assert row is not None
        assert row[0] > 0
        child.communicate(b"\n")
    assert sampler.sample() is None
    sampler.close()


def test_devices_of_drivers_have_columns() -> None:
    reading = DeviceReading(device="nvidia:0", model="H100", used_bytes=5, power_watts=300.0)
    driver = SimpleNamespace(read=lambda: (reading,), close=lambda: None)
    sampler = UsageSampler(drivers=DriversFound(drivers=(driver,), absent={}))
    row = sampler.sample()
    assert row is not None
    numbers = dict(zip(sampler.columns, row, strict=True))
    assert (numbers["nvidia:0/used_bytes"], numbers["nvidia:0/power_watts"]) == (5.0, 300.0)
    assert math.isnan(numbers["nvidia:0/temperature_celsius"])
    sampler.close()


def test_intervals_are_positive() -> None:
    with pytest.raises(ValueError, match="cgroup_seconds=0: must be above 0"):
        SamplerSettings(cgroup_seconds=0)
