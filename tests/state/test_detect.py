import pytest
import torch

from drivetrain_state import (
    DeviceCapability,
    best_device_kind,
    capabilities,
    describe_environment,
    detect_devices,
    device_count,
)
from drivetrain_state.detect import cuda_ability, nvidia_link, rocm_ability


def test_the_cpu_is_always_there_and_last() -> None:
    assert detect_devices()[-1].kind == "cpu"
    assert device_count("cpu") == 1


def test_the_best_device_is_the_first_that_is_found() -> None:
    first = detect_devices()[0].kind
    assert best_device_kind() == ("cuda" if first == "rocm" else first)


def test_every_kind_found_is_described() -> None:
    lines = describe_environment().splitlines()
    assert len(lines) == len(detect_devices())
    assert lines[-1] == "cpu x 1, fp16 bf16"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), DeviceCapability(fp16=False, bf16=False, fp8=False)),
        ((7, 0), DeviceCapability(fp16=True, bf16=False, fp8=False)),
        ((7, 5), DeviceCapability(fp16=True, bf16=False, fp8=False)),
        ((8, 0), DeviceCapability(fp16=True, bf16=True, fp8=False)),
        ((8, 9), DeviceCapability(fp16=True, bf16=True, fp8=True)),
        ((9, 0), DeviceCapability(fp16=True, bf16=True, fp8=True)),
        ((10, 0), DeviceCapability(fp16=True, bf16=True, fp8=True)),
    ],
)
def test_cuda_abilities_come_with_the_generation(
    capability: tuple[int, int], expected: DeviceCapability
) -> None:
    assert cuda_ability(capability) == expected


@pytest.mark.parametrize(
    ("architecture", "bf16", "fp8"),
    [("gfx906", False, False), ("gfx90a", True, False), ("gfx942:sramecc+", True, True)],
)
def test_rocm_abilities_come_with_the_architecture(architecture: str, bf16: bool, fp8: bool) -> None:
    assert rocm_ability(architecture) == DeviceCapability(fp16=True, bf16=bf16, fp8=fp8)


def test_other_kinds_are_alike() -> None:
    assert capabilities("cpu").bf16
    assert not capabilities(torch.device("xla")).fp16
    with pytest.raises(ValueError, match="device='vulkan': known kinds are cuda, cpu"):
        capabilities("vulkan")


def test_one_device_has_no_link() -> None:
    assert nvidia_link([]) is None
    assert nvidia_link(["GPU-0"]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without an NVIDIA driver")
def test_without_a_driver_the_link_is_not_known() -> None:
    assert nvidia_link(["GPU-0", "GPU-1"]) is None
