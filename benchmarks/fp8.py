"""Training in fp8 on a CPU: what a step takes beside bf16, torchao alone and Accelerate, and what conversion takes.

    uv run --group bench python benchmarks/fp8.py

A CPU computes fp8 by products in fp32; `cuda/fp8_recipes.py` measures the same contestants on a card.
"""

import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from rounds import Table, installed, parse_arguments, repeated, report, take_turns
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_precision import (
    Fp8Recipe,
    LayerFilter,
    TorchaoRecipe,
    convert_model,
    load_recipe,
    recipe_names,
)

ALL = LayerFilter(skip_first=False, skip_last=False)
NOTE = (
    "Every contestant computes under autocast to bf16 what it does not compute in fp8. For comparison, torchtitan's "
    "commit 7a04053 states for Llama 3 8B on H100 with torch.compile: 5,760 tokens a second and GPU in bf16, 6,412 "
    "rowwise, 7,186 tensorwise with the all-gather in float8."
)
Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What is trained: by default the smallest that keeps two cores busy.

    Attributes:
        width: Features.
        depth: Blocks.
        tokens: Rows of a batch.
        device: Where.
        compiler: The backend of torch.compile, for all that is meant to be compiled; None for none.
    """

    width: int = 256
    depth: int = 4
    tokens: int = 512
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compiler: str | None = None

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the blocks and their optimizer, on the device."""
        with self.device:
            built = nn.Sequential(*(Block(self.width) for _ in range(self.depth)))
        return built, torch.optim.AdamW(built.parameters(), lr=1e-4)

    def compiled(self, built: Any, *, wanted: bool = True) -> Any:
        """Return the blocks, compiled if that is wanted."""
        return torch.compile(built, backend=self.compiler) if self.compiler and wanted else built

    def batch(self) -> Tensor:
        """Return the inputs, (tokens, width)."""
        return torch.randn(self.tokens, self.width, device=self.device)


class Block(nn.Module):
    """The two products of a feed-forward layer, around a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states with the layer's contribution."""
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def accelerated(accelerator: Any, layers: Layers, *, compiled: bool = True) -> Step:
    """The loop that Accelerate documents, and drivetrain too."""
    built, optimizer = accelerator.prepare(*layers.made())
    built, inputs = layers.compiled(built, wanted=compiled), layers.batch()

    def step() -> None:
        accelerator.backward(built(inputs).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_drivetrain(layers: Layers, *, compiled: bool = True, **options: Any) -> Step:
    """Drivetrain in a precision."""
    accelerator = Accelerator(
        cpu=layers.device.type == "cpu", sections={"run": {"show_plan": False}}, **options
    )
    return accelerated(accelerator, layers, compiled=compiled)


def by_torchao(layers: Layers) -> Step:
    """Torchao alone, under autocast to bf16 as the others."""
    from torchao.float8 import convert_to_float8_training

    built, _ = layers.made()
    convert_to_float8_training(built)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    built, inputs = layers.compiled(built), layers.batch()

    def step() -> None:
        with torch.autocast(layers.device.type, torch.bfloat16):
            loss = built(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_accelerate(layers: Layers) -> Step:
    """Accelerate with its recipe for torchao."""
    from accelerate.utils import AORecipeKwargs

    from accelerate import Accelerator as Other

    def is_linear(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear)

    handler = AORecipeKwargs(module_filter_func=is_linear)
    on_cpu = layers.device.type == "cpu"
    return accelerated(Other(cpu=on_cpu, mixed_precision="fp8", kwargs_handlers=[handler]), layers)


def contestants(layers: Layers) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield what trains, by name; bf16 first, to which the others are compared."""
    yield "bf16", lambda: in_drivetrain(layers, mixed_precision="bf16")
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.support(layers.device).level != "none":
            yield name, lambda given=recipe: in_fp8(layers, of_all_layers(given))
    if installed("torchao"):
        yield "torchao, tensorwise", lambda: by_torchao(layers)
        if installed("accelerate"):
            yield "Accelerate, tensorwise", lambda: by_accelerate(layers)


def of_all_layers(recipe: Fp8Recipe) -> Fp8Recipe:
    """Return a recipe that leaves no layer out."""
    options: dict[str, Any] = {"layers": ALL}
    return replace(cast("Any", recipe), **options)


def in_fp8(layers: Layers, recipe: Fp8Recipe) -> Step:
    """Drivetrain by a recipe, compiled where its library is meant to be."""
    wanted = recipe.requirements.wants_compile
    return in_drivetrain(layers, compiled=wanted, mixed_precision="fp8", fp8_recipe=recipe)


def conversion(convert: Callable[[nn.Module], object]) -> Callable[[], float]:
    """Return a turn that gives the seconds of converting 200 layers."""

    def turn() -> float:
        built = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))
        begin = time.perf_counter()
        convert(built)
        return time.perf_counter() - begin

    return turn


def main() -> None:
    """Time conversions and steps."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    arguments = parse_arguments(__doc__ or "", rounds=7)
    recipe = TorchaoRecipe(scaling="tensorwise", layers=ALL)
    converted = {
        "torchao": conversion(lambda built: convert_to_float8_training(built, config=Float8LinearConfig())),
        "convert_model": conversion(lambda built: convert_model(built, recipe)),
    }
    tables = [
        Table(
            title="Conversion of 200 layers",
            unit="ms",
            measured=take_turns(converted, rounds=arguments.rounds),
        )
    ]
    layers = Layers()
    turns: dict[str, Callable[[], float]] = {}
    for name, make in contestants(layers):
        with left_out(name):
            turns[name] = repeated(make(), times=2)
    title = f"A step of {layers.depth} layers of {layers.width} features, {layers.tokens} tokens"
    tables.append(Table(title=title, unit="ms", measured=take_turns(turns, rounds=arguments.rounds)))
    report("fp8", tables, arguments, note=NOTE)


@contextmanager
def left_out(name: str) -> Generator[None]:
    """Leave out a contestant that cannot run here, and say why."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever another library raises
        print(f"{name} does not run here: {error}", file=sys.stderr)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*Enum subclass.*")
    main()
