"""Training in fp8: on a card that has the units, by emulation on the CPU beside a device that has none."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_checkpoint import load_model
from drivetrain_precision import (
    Fp8Recipe,
    LayerFilter,
    PrecisionError,
    TorchaoRecipe,
    TransformerEngineRecipe,
    convert_model,
)
from drivetrain_state import capabilities
from hardware.devices import OnDevice, first, here

QUIET: dict[str, Any] = {"run": {"show_plan": False}}
ALL = LayerFilter(skip_first=False, skip_last=False)


def refused() -> None:
    with pytest.raises(
        PrecisionError, match=r"'torchao_tensorwise': it needs an Ada, .*, and the device is npu:0"
    ):
        Accelerator(mixed_precision="fp8", fp8_recipe=TorchaoRecipe(layers=ALL), sections=QUIET)


def losses(scaling: Any, cpu: bool) -> list[float]:
    """The losses of a model that was converted by hand, which no check of the device refuses."""
    with Accelerator(mixed_precision="bf16", sections=QUIET, cpu=cpu) as accelerator:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        convert_model(model, TorchaoRecipe(scaling=scaling, layers=ALL))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        rows = torch.randn(8, 128).to(accelerator.device)
        found: list[float] = []
        for _ in range(3):
            loss = model(rows).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def by_hand() -> None:
    for scaling in ("tensorwise", "rowwise", "mxfp8"):
        found = losses(scaling, cpu=False)
        assert found[-1] < found[0]
        assert found == pytest.approx(losses(scaling, cpu=True), rel=0.01)
    with pytest.raises(PrecisionError, match="torchao_nvfp4: it needs a Blackwell or newer GPU"):
        losses("nvfp4", cpu=False)


SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp", "nvfp4")


def without_units() -> bool:
    """Whether the device computes no fp8: the CPU does it then, by emulation."""
    return not capabilities(first()).fp8


class Student(nn.Sequential):
    """Three layers, each with a product for its output and two for the gradients."""

    def __init__(self) -> None:
        width = 128 * here().scale
        layers = [nn.Linear(128, width), nn.Linear(width, width), nn.Linear(width, 128)]
        super().__init__(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])


def learned(
    recipe: Fp8Recipe | None, backend: str = "single", folder: Path | None = None
) -> tuple[float, str]:
    """Learn from a noisy teacher in fp8, or in bf16; the mean of the last losses, and the count of products."""
    with Accelerator(
        mixed_precision="bf16" if recipe is None else "fp8",
        fp8_recipe=recipe,
        backend=backend,
        sections=QUIET,
        cpu=without_units() or None,
    ) as accelerator:
        place = accelerator.device
        torch.manual_seed(0)
        teacher, model = nn.Linear(128, 128).to(place), Student()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses: list[Tensor] = []
        for _ in range(min(200, 20 * here().scale)):  # some CPUs take 50 ms to emulate a product
            rows = torch.randn(64, 128).to(place)
            with torch.no_grad():
                wanted = teacher(rows) + 0.3 * torch.randn(64, 128).to(place)
            loss = (model(rows).float() - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if folder is not None:
            exports(accelerator, model, rows, folder)
        told = accelerator.plan.facts.get("fp8 products", "")
    return torch.stack(losses[-len(losses) // 5 :]).mean().item(), told


def exports(accelerator: Accelerator, model: nn.Module, rows: Tensor, folder: Path) -> None:
    """What is exported is a plain model's: the same names, whole weights, and nearly the same outputs."""
    accelerator.save_model(model, folder)
    plain = Student().to(accelerator.device)
    load_model(plain, folder)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    with torch.no_grad():
        outputs, expected = model(rows).float(), plain(rows)
    assert (outputs - expected).norm() < 0.2 * expected.norm()


def learns(recipe: Fp8Recipe, folder: Path) -> str:
    """Losses are near those of bf16, and the count tells that all products which should be are in the recipe."""
    in_bf16, _ = learned(None)
    loss, told = learned(recipe, folder=folder)
    assert loss == pytest.approx(in_bf16, rel=0.1)
    if recipe.requirements.counts_emulation or not without_units():
        found = re.match(rf"(\d+) of (\d+) matrix products of the first step ran in {recipe.name}\b", told)
        assert found is not None, told
        others = 3 if recipe.products.weight_gradient == "bf16 x bf16" else 0
        assert int(found[1]) == int(found[2]) - others >= 5, told
    return f"{recipe.name}: {loss:.4f}, bf16 {in_bf16:.4f}"


def learns_or_is_refused(scaling: Any, folder: Path) -> str:
    recipe = TorchaoRecipe(scaling=scaling, layers=ALL)
    place = torch.device("cpu" if without_units() else first())
    if recipe.support(place).level != "none":
        return learns(recipe, folder)
    needed = re.escape(f"'{recipe.name}': it needs {recipe.requirements.hardware}")
    with pytest.raises(PrecisionError, match=needed):
        learned(recipe)
    return f"{recipe.name}: refused"


def knows_its_generation() -> None:
    """Blackwell (10.0) has the units of MXFP8 and NVFP4, Hopper has not."""
    is_new = torch.cuda.get_device_capability() >= (10, 0)
    for scaling in ("mxfp8", "mxfp8_with_gw_hp", "nvfp4"):
        found = TorchaoRecipe(scaling=scaling).support(torch.device(first()))
        assert found.level == ("native" if is_new else "none"), found
        assert is_new or found.reason.startswith("it needs a Blackwell or newer GPU (10.0), and ")


def gathers(backend: str) -> None:
    """Weights that FSDP2 gathers in fp8 train as those that it gathers in bf16."""
    plain, gathered = (
        learned(TorchaoRecipe(all_gather=all_gather, layers=ALL), backend) for all_gather in (False, True)
    )
    assert gathered[0] == pytest.approx(plain[0], rel=0.05)
    assert gathered[1] == plain[1]
    assert re.match(r"(\d+) of \1 matrix products", gathered[1]), gathered[1]


def learns_by_transformer_engine(scaling: Any, folder: Path) -> str:
    return learns(TransformerEngineRecipe(scaling=scaling, layers=ALL), folder)


@pytest.mark.only_on("simulated", why="a card has the units")
@pytest.mark.default_cases
def test_what_has_no_units_is_refused_and_what_is_converted_by_hand_is_emulated(on_device: OnDevice) -> None:
    pytest.importorskip("torchao", reason="wants torchao, which an extra of drivetrain-precision brings")
    on_device(refused)
    on_device(by_hand)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.default_cases("nvfp4")
def test_a_recipe_of_torchao_learns_as_bf16_does_or_is_refused_by_name(
    on_device: OnDevice, scaling: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="wants torchao, which an extra of drivetrain-precision brings")
    print(*on_device(learns_or_is_refused, scaling, tmp_path))


@pytest.mark.only_on("cuda", why="it asks the card for its generation")
def test_recipes_of_small_blocks_want_blackwell(on_device: OnDevice) -> None:
    pytest.importorskip("torchao", reason="wants torchao, which an extra of drivetrain-precision brings")
    on_device(knows_its_generation)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.default_cases
def test_weights_are_gathered_in_fp8(on_device: OnDevice, num_processes: int) -> None:
    pytest.importorskip("torchao", reason="wants torchao, which an extra of drivetrain-precision brings")
    on_device(gathers, "fsdp", num_processes=num_processes)


@pytest.mark.parametrize("scaling", ["delayed", "current", "block"])
@pytest.mark.only_on("cuda", why="Transformer Engine is built for CUDA alone")
def test_a_recipe_of_transformer_engine_learns_as_bf16_does(
    on_device: OnDevice, scaling: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformer_engine", reason="wants Transformer Engine")
    print(*on_device(learns_by_transformer_engine, scaling, tmp_path))
