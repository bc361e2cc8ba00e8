"""Which modules are a model's blocks, gathered or computed again one at a time: read off it, nothing touched."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.fsdp import FSDPModule

from drivetrain_backends.modules.activation_checkpointing import CheckpointedForward
from drivetrain_backends.modules.autocast_forward import PreparedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A model's blocks; where it is sharded, what they leave over is sharded with the root.

    Attributes:
        blocks: Their names, inner ones before the ones around them, else in the order the model holds them.
        reason: What they were chosen by.
        left_out: Names of modules that would be blocks but for a parameter they share, with that parameter's name.
    """

    blocks: tuple[str, ...]
    reason: str
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def plan_blocks(
    model: nn.Module,
    classes: tuple[str, ...] | None = None,
    *,
    asked: str,
    min_num_params: int | None = None,
    others: Iterable[nn.Module] = (),
) -> BlockPlan:
    """Choose the blocks of a model: by class, by size, as the model says itself, or the modules of its lists.

    A block that shares a parameter with a module outside of it is left out, so that the parameter is gathered with
    the nearest block around both, or with the root.

    Args:
        model: The model, with values or on meta.
        classes: Names of the blocks' classes; None where they are not said.
        asked: The setting that says them.
        min_num_params: Else, modules of at least so many elements are blocks; None where that is not said.
        others: The other models of the run, which may be the ones that a class is asked for.

    Raises:
        ValueError: A class is asked for that no model has; the message lists those there are.
    """
    modules = {name: module for name, module in model.named_modules() if name and _has_parameters(module)}
    if classes is not None:
        chosen, reason = _by_class(modules, classes, [model, *others], asked), asked
    elif min_num_params is not None:
        chosen, reason = _by_size(model, min_num_params), "min_num_params"
    elif own := [n for n, m in modules.items() if class_name(m) in _no_split_modules(model)]:
        chosen, reason = own, "the model's _no_split_modules"
    else:
        chosen = [n for n in modules if _is_listed(model, n)]
        reason = "the modules of its lists" if chosen else "no lists in the model, so all of it at once"
    chosen = [name for name in chosen if not _is_container(modules[name])]
    left_out = {name: shared for name in chosen if (shared := _shared_outside(model, name)) is not None}
    kept = [name for name in chosen if name not in left_out]
    return BlockPlan(blocks=tuple(_inner_first(kept)), reason=reason, left_out=left_out)


def class_name(module: nn.Module) -> str:
    """The name of the user's class, behind those that stand in for it."""
    kind = type(module)
    while issubclass(kind, (FSDPModule, CheckpointedForward, PreparedForward)):
        kind = kind.__mro__[2]
    return kind.__name__


def _by_class(
    modules: dict[str, nn.Module], wanted: tuple[str, ...], models: list[nn.Module], asked: str
) -> list[str]:
    there = {m for model in models for m in model.modules() if _has_parameters(m)}
    classes = {class_name(module) for module in there}
    if unknown := [name for name in wanted if name not in classes]:
        raise ValueError(
            f"{asked}={', '.join(unknown)}: no model has a module of that class with parameters; there are "
            f"{', '.join(sorted(classes)) or 'none'}"
        )
    containers = {class_name(m) for m in there if _is_container(m)}
    if odd := [name for name in wanted if name in containers]:
        raise ValueError(
            f"{asked}={', '.join(odd)}: a container has no forward of its own; name the class of the "
            f"modules in it, one of {', '.join(sorted(classes - containers))}"
        )
    return [name for name, module in modules.items() if class_name(module) in wanted]


def _by_size(model: nn.Module, least: int) -> list[str]:
    """Modules that hold at least `least` elements beyond those of the blocks inside them."""
    found: list[str] = []

    def left_over(name: str, module: nn.Module) -> int:
        inside = sum(
            left_over(f"{name}.{key}" if name else key, child) for key, child in module.named_children()
        )
        size = inside + sum(p.numel() for p in module.parameters(recurse=False))
        if name and size >= least and not _is_container(module):
            found.append(name)
            return 0
        return size

    left_over("", model)
    known = dict(model.named_modules())  # a module that is held twice goes by its first name
    return [name for name in found if name in known]


def _no_split_modules(model: nn.Module) -> set[str]:
    """What models of the transformers library, and others after them, call their blocks."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _is_listed(model: nn.Module, name: str) -> bool:
    """Whether a module is an item of a ModuleList that is not itself inside an item of another."""
    parts = name.split(".")
    lists = [
        depth
        for depth in range(len(parts))
        if isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList)
    ]
    return lists == [len(parts) - 1]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _shared_outside(model: nn.Module, block: str) -> str | None:
    """The name, outside a block, of a parameter that the block holds too."""
    module = model.get_submodule(block)
    inside, within = set(module.parameters()), set(module.modules())
    for name, other in model.named_modules():
        if other in within:
            continue
        for key, parameter in other.named_parameters(recurse=False):
            if parameter in inside:
                return f"{name}.{key}" if name else key
    return None


def _inner_first(names: list[str]) -> list[str]:
    """Each name after those that lie below it, the order kept otherwise."""
    ordered: list[str] = []
    for name in names:
        around = next((i for i, n in enumerate(ordered) if name.startswith(f"{n}.")), len(ordered))
        ordered.insert(around, name)
    return ordered
