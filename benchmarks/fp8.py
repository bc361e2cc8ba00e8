"""Training in fp8: speed and memory of each recipe beside bf16, and what the conversion of a model costs.

    uv run --group bench python benchmarks/fp8.py

On a CUDA device speed and peak memory of a decoder's layers; on a CPU, which computes fp8 by products in fp32, what a
step takes beside torchao alone and Accelerate, and what conversion takes.
"""

import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rounds import Table, installed, parse_arguments, report, take_turns
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from drivetrain import Accelerator
from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model, load_recipe, recipe_names

ALL = LayerFilter(skip_first=False, skip_last=False)
ON_CUDA = torch.cuda.is_available()
# A decoder of 1.2 billion parameters on a GPU; on a CPU the smallest that keeps both cores busy.
WIDTH, DEPTH, TOKENS, STEPS = (2048, 24, 8192, 10) if ON_CUDA else (256, 4, 512, 2)
NOTE = (
    "Every contestant computes under autocast to bf16 what it does not compute in fp8. For comparison, torchtitan's "
    "commit 7a04053 states for Llama 3 8B on H100 with torch.compile: 5,760 tokens a second and GPU in bf16, 6,412 "
    "rowwise, 7,186 tensorwise with the all-gather in float8."
)
Step = Callable[[], None]


class Block(nn.Module):
    """The two products of a feed-forward layer, around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states with the layer's contribution."""
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def model() -> nn.Module:
    """The layers."""
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def accelerated(accelerator: Any, built: nn.Module) -> Step:
    """The loop that Accelerate documents, and drivetrain too."""
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    built, optimizer = accelerator.prepare(built, optimizer)
    if ON_CUDA:
        built = torch.compile(built)
    inputs = torch.randn(TOKENS, WIDTH, device=accelerator.device)

    def step() -> None:
        for _ in range(STEPS):
            accelerator.backward(built(inputs).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return step


def in_drivetrain(**options: Any) -> Step:
    """Drivetrain in a precision."""
    return accelerated(
        Accelerator(cpu=not ON_CUDA, sections={"run": {"show_plan": False}}, **options), model()
    )


def by_torchao() -> Step:
    """Torchao alone, under autocast to bf16 as the others."""
    device = torch.device("cuda" if ON_CUDA else "cpu")
    built = model().to(device)
    convert_to_float8_training(built)
    if ON_CUDA:
        built = torch.compile(built)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    inputs = torch.randn(TOKENS, WIDTH, device=device)

    def step() -> None:
        for _ in range(STEPS):
            with torch.autocast(device.type, torch.bfloat16):
                loss = built(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def by_accelerate() -> Step:
    """Accelerate with its recipe for torchao."""
    from accelerate.utils import AORecipeKwargs

    from accelerate import Accelerator as Other

    handler = AORecipeKwargs(module_filter_func=lambda module, _: isinstance(module, nn.Linear))
    return accelerated(Other(cpu=not ON_CUDA, mixed_precision="fp8", kwargs_handlers=[handler]), model())


def contestants() -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield what trains, by name; bf16 first, to which the others are compared."""
    yield "bf16", lambda: in_drivetrain(mixed_precision="bf16")
    device = torch.device("cuda" if ON_CUDA else "cpu")
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.support(device).level != "none" and isinstance(recipe, TorchaoRecipe):
            given = TorchaoRecipe(scaling=recipe.scaling, layers=ALL)
            yield name, lambda given=given: in_drivetrain(mixed_precision="fp8", fp8_recipe=given)
    yield "torchao alone, tensorwise", by_torchao
    if installed("accelerate"):
        yield "Accelerate, tensorwise", by_accelerate


def timed(step: Step) -> Callable[[], float]:
    """Return a turn that gives the seconds of a step."""

    def turn() -> float:
        begin = time.perf_counter()
        step()
        if ON_CUDA:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / STEPS

    return turn


def conversion(convert: Callable[[nn.Module], object]) -> Callable[[], float]:
    """Return a turn that gives the seconds of converting 200 layers."""

    def turn() -> float:
        built = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))
        begin = time.perf_counter()
        convert(built)
        return time.perf_counter() - begin

    return turn


def main() -> None:
    """Time conversions and steps, and on CUDA measure memory."""
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
    steps: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    for name, make in contestants():
        with left_out(name):
            steps[name] = make()
            if ON_CUDA:
                torch.cuda.reset_peak_memory_stats()
                steps[name]()
                peaks[name] = torch.cuda.max_memory_allocated()
    turns = {name: timed(step) for name, step in steps.items()}
    title = f"A step of {DEPTH} layers of {WIDTH} features, {TOKENS} tokens"
    tables.append(Table(title=title, unit="ms", measured=take_turns(turns, rounds=arguments.rounds)))
    if peaks:
        measured = {name: [peak] for name, peak in peaks.items()}
        tables.append(Table(title="Peak memory", unit="MB", measured=measured))
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
