"""The modules of a model that can be watched, and the tensors in their inputs and outputs."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

from drivetrain_precision.compat import compiled_part, unwrap_compiled
from drivetrain_precision.nested_tensors import floating_tensors


class Layer(NamedTuple):
    """A watched module, and the name of the module that holds it; None for a model itself."""

    name: str
    module: nn.Module
    parent: str | None


def watched_layers(
    models: Mapping[str, nn.Module], *, inside_compiled: bool = False
) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return the modules of models to hook, each once, and the names of compiled modules, whose inside is not hooked.

    With `inside_compiled`, it is, except in TorchScript.
    """
    layers: dict[nn.Module, Layer] = {}
    compiled: list[str] = []

    def add(module: nn.Module, name: str, parent: str | None) -> None:
        module = unwrap_compiled(module) if inside_compiled else module
        if module in layers:
            return
        part = None if inside_compiled and not isinstance(module, ScriptModule) else compiled_part(module)
        if part is not None:
            compiled.append(name)
        if part != "call":
            layers[module] = Layer(name, module, parent)
        if part is None:
            for child, inner in module.named_children():
                add(inner, f"{name}.{child}" if name else child, name)

    for prefix, model in models.items():
        inner = model  # the user's module is inside the wrappers of backends, which call it `module`
        while isinstance(inner, DistributedDataParallel) or (
            [name for name, _ in inner.named_children()] == ["module"]
            and next(inner.parameters(recurse=False), None) is None
        ):
            inner = cast("nn.Module", inner.module)
        add(inner, prefix, None)
    return tuple(layers.values()), tuple(compiled)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Return the tensors of floating-point numbers in nested containers, each once."""
    return {id(each): each for each in floating_tensors(value) if not each.is_meta}.values()
