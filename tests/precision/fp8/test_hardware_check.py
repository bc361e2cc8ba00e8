from pathlib import Path

import pytest
import torch

from drivetrain_precision import PrecisionError, Requirements, TorchaoRecipe, convert_model
from drivetrain_precision.fp8.hardware_check import check_capability, check_hardware

CPU = torch.device("cpu")


def needs() -> Requirements:
    return Requirements(
        library="torch", version="2.0", extra="torchao", capability=(9, 0), hardware="a Hopper GPU"
    )


def test_a_recipe_whose_library_is_too_old_converts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "torchao-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert TorchaoRecipe().support(CPU).reason.startswith("torchao 0.1 is too old, 0.18 has it")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    with pytest.raises(PrecisionError, match=r"recipe torchao_tensorwise: torchao 0\.1 is too old"):
        convert_model(model, TorchaoRecipe())
    assert type(model[1]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("found", "level"), [((8, 0), "none"), ((8, 9), "none"), ((9, 0), "native"), ((12, 0), "native")]
)
def test_a_cuda_device_is_held_against_the_first_capability(found: tuple[int, int], level: str) -> None:
    support = check_capability(needs(), found, "NVIDIA Test")
    shown = f"NVIDIA Test has compute capability {found[0]}.{found[1]}"
    assert support.level == level
    assert support.reason == (shown if level == "native" else f"it needs a Hopper GPU (9.0), and {shown}")


def test_a_cpu_runs_what_is_emulated_and_nothing_else() -> None:
    assert check_hardware(needs(), CPU, emulates=True).level == "emulated"
    support = check_hardware(needs(), CPU, emulates=False)
    assert (support.level, support.reason) == ("none", "it needs a Hopper GPU, and the device is cpu")


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_devices_of_other_kinds_run_none(kind: str) -> None:
    support = check_hardware(needs(), torch.device(kind), emulates=True)
    assert (support.level, support.reason) == ("none", f"it needs a Hopper GPU, and the device is {kind}")
