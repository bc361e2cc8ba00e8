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
    ("capability", "dtypes"),
    [
        ((6, 1), ()),
        ((7, 0), ("fp16",)),
        ((7, 5), ("fp16",)),
        ((8, 0), ("fp16", "bf16")),
        ((8, 9), ("fp16", "bf16", "fp8")),
        ((9, 0), ("fp16", "bf16", "fp8")),
        ((10, 0), ("fp16", "bf16", "fp8")),
    ],
)
def test_cuda_abilities_come_with_the_generation(
    capability: tuple[int, int], dtypes: tuple[str, ...]
) -> None:
    expected = {name: name in dtypes for name in ("fp16", "bf16", "fp8")}
    assert cuda_ability(capability) == DeviceCapability(**expected)


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
    assert nvidia_link([]) is nvidia_link(["GPU-0"]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without an NVIDIA driver")
def test_without_a_driver_the_link_is_not_known() -> None:
    assert nvidia_link(["GPU-0", "GPU-1"]) is None
