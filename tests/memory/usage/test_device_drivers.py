"""Vendors' libraries need a device: modules of the same form stand in, beside the real ones without one."""

import time
from types import SimpleNamespace

import pytest
import torch

from drivetrain_memory.usage.amd import AmdDriver, open_amd
from drivetrain_memory.usage.device_drivers import DriverPoller, DriversFound, find_drivers
from drivetrain_memory.usage.device_reading import DeviceReading, DriverAbsentError
from drivetrain_memory.usage.intel import IntelDriver, open_intel
from drivetrain_memory.usage.nvml import HABANA, NVIDIA, NvmlDriver


class VendorError(Exception):
    """The error of a vendor's library."""


def refuses(*arguments: object) -> object:
    raise VendorError("not supported")


def nvml() -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=VendorError,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5, total=80),
        nvmlDeviceGetPowerUsage=lambda handle: 350_500,
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
        nvmlDeviceGetUtilizationRates=refuses,
        nvmlShutdown=lambda: None,
    )


def amdsmi() -> SimpleNamespace:
    return SimpleNamespace(
        AmdSmiLibraryException=VendorError,
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiTemperatureType=SimpleNamespace(EDGE=0, HOTSPOT=1),
        amdsmi_get_processor_handles=lambda: ["a"],
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "MI300X"},
        amdsmi_get_gpu_vram_usage=lambda handle: {"vram_used": 3, "vram_total": 192},
        amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 500},
        amdsmi_get_temp_metric=lambda handle, sensor, metric: 55 if sensor else "N/A",
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 90},
        amdsmi_shut_down=lambda: None,
    )


def xpu() -> SimpleNamespace:
    return SimpleNamespace(
        device_count=lambda: 1,
        get_device_name=lambda index: "Max 1550",
        mem_get_info=lambda index: (28, 30),
        power_draw=lambda index: 200.0,
        temperature=lambda index: 50,
    )


def hlml() -> SimpleNamespace:
    return SimpleNamespace(
        HLMLError=VendorError,
        hlmlDeviceGetCount=lambda: 1,
        hlmlDeviceGetHandleByIndex=lambda index: index,
        hlmlDeviceGetName=lambda handle: b"HL-325",
        hlmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=7, total=128),
        hlmlDeviceGetPowerUsage=lambda handle: 400_000,
        hlmlDeviceGetTemperature=lambda handle, sensor: 45,
        hlmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(aip=12),
        hlmlShutdown=lambda: None,
    )


def test_each_vendor_tells_in_one_form() -> None:
    drivers = (
        NvmlDriver(NVIDIA, nvml()),
        AmdDriver(amdsmi()),
        IntelDriver(xpu()),
        NvmlDriver(HABANA, hlml()),
    )
    readings = [reading for driver in drivers for reading in driver.read()]
    assert readings == [
        DeviceReading(
            device="nvidia:0",
            model="NVIDIA H100",
            used_bytes=5,
            total_bytes=80,
            power_watts=350.5,
            temperature_celsius=61,
        ),
        DeviceReading(
            device="amd:0",
            model="MI300X",
            used_bytes=3 * 2**20,
            total_bytes=192 * 2**20,
            power_watts=500,
            temperature_celsius=55,
            utilization_percent=90,
        ),
        DeviceReading(
            device="intel:0",
            model="Max 1550",
            used_bytes=2,
            total_bytes=30,
            power_watts=200,
            temperature_celsius=50,
        ),
        DeviceReading(
            device="habana:0",
            model="HL-325",
            used_bytes=7,
            total_bytes=128,
            power_watts=400,
            temperature_celsius=45,
            utilization_percent=12,
        ),
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="wants a machine without an accelerator")
def test_an_absent_driver_is_no_error_and_says_what_is_missing() -> None:
    found = find_drivers()
    assert found.drivers == ()
    assert set(found.absent) == {"nvidia", "amd", "intel", "habana"}
    for opens, reason in {
        NVIDIA.open: "no NVIDIA driver: NVMLError",  # the real package, asked without a driver
        open_amd: "amdsmi",
        open_intel: "torch sees no Intel device",
        HABANA.open: "pyhlml",
    }.items():
        with pytest.raises(DriverAbsentError, match=reason):
            opens()


def test_a_slow_driver_is_read_beside_and_a_failing_one_ends_its_numbers() -> None:
    library = nvml()
    driver = NvmlDriver(NVIDIA, library)
    poller = DriverPoller([driver], interval_seconds=0.01)
    assert poller.newest[0].temperature_celsius == 61
    library.nvmlDeviceGetTemperature = lambda handle, sensor: 70
    deadline = time.monotonic() + 60
    while poller.newest[0].temperature_celsius != 70 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert poller.newest[0].temperature_celsius == 70
    poller.close()


def test_a_driver_that_fails_from_the_start_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    library = nvml()

    def lost(index: int) -> object:
        raise RuntimeError("GPU is lost\nand more")

    library.nvmlDeviceGetHandleByIndex = lost
    found = find_drivers({"nvidia": lambda: NvmlDriver(NVIDIA, library)})
    assert found == DriversFound(drivers=(), absent={"nvidia": "the driver fails: RuntimeError: GPU is lost"})

    class Failing:
        closed = False

        def read(self) -> tuple[DeviceReading, ...]:
            raise RuntimeError("GPU is lost")

        def close(self) -> None:
            self.closed = True

    driver = Failing()
    poller = DriverPoller([driver], interval_seconds=0.01)
    poller.close()
    assert (poller.newest, driver.closed) == ((), True)
    assert "its numbers end here" in caplog.text


def test_found_drivers_are_handed_on() -> None:
    driver = NvmlDriver(NVIDIA, nvml())
    assert find_drivers({"nvidia": lambda: driver}) == DriversFound(drivers=(driver,), absent={})
