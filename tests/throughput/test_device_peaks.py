"""The table of peaks: known names are found, each entry is whole, and others are unknown."""

import re
import tomllib
from importlib.resources import files

import pytest

from drivetrain_throughput import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_a_device_is_found_by_its_drivers_name(name: str, precision: str, teraflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "fp32"),
        ("NVIDIA A10G", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),  # slower than the H200 whose name begins like its own
        ("NVIDIA H100 NVL", "bf16"),
        ("AMD Instinct MI250X / MI250", "bf16"),  # of which torch sees two devices each
    ],
)
def test_an_unknown_device_or_precision_has_no_peak(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_each_entry_has_sources_and_plausible_numbers() -> None:
    text = files("drivetrain_throughput").joinpath("device_peaks.toml").read_text()
    for device in tomllib.loads(text)["device"]:
        re.compile(device["name"])
        assert device["sources"]
        assert all(page.startswith("https://") for page in device["sources"])
        assert 1 < device["fp32"] < device["fp16"] < 1e5
