"""Choose a model's blocks: the modules that are gathered or recomputed one at a time. The model is not changed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule

from drivetrain_backends.modules.activation_checkpointing import CheckpointedForward
from drivetrain_backends.modules.autocast_forward import PreparedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """The blocks of a model; in a sharded model the remaining parameters are sharded with the root."""

    # The names of the blocks, inner ones before those around them, otherwise in module order.
    blocks: tuple[str, ...]
    reason: str  # the criterion that chose them
    # The modules excluded as blocks because they share a parameter, each with that parameter's name.
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def plan_blocks(
    model: nn.Module,
    classes: tuple[str, ...] | None = None,
    *,
    asked: str,
    min_num_params: int | None = None,
    others: Iterable[nn.Module] = (),
) -> BlockPlan:
    """Choose a model's blocks: by class or name, by size, as the model itself declares, or the modules of its lists.

    A module that shares a parameter with a module outside is no block: the parameter is gathered with the nearest
    block around both modules, or with the root. Without `classes`, a block has at least `min_num_params` elements. A
    class or name in neither the model nor `others` is an error; its message names the setting `asked`.
    """
    modules = {name: module for name, module in model.named_modules() if name and _has_parameters(module)}
    declared = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    if classes is not None:
        chosen, reason = _choose_by_class(modules, classes, [model, *others], asked), asked
    elif min_num_params is not None:
        chosen, reason = _choose_by_size(model, min_num_params), "min_num_params"
    elif own := [n for n, m in modules.items() if class_name(m) in declared]:
        chosen, reason = own, "the model's _no_split_modules"
    else:
        chosen = [n for n in modules if _is_listed(model, n)]
        reason = "the modules of its lists" if chosen else "no lists in the model, so all of it at once"
    chosen = [name for name in chosen if not _is_container(modules[name])]
    left_out = {name: shared for name in chosen if (shared := _find_shared_outside(model, name)) is not None}
    kept = [name for name in chosen if name not in left_out]
    return BlockPlan(blocks=tuple(_inner_first(kept)), reason=reason, left_out=left_out)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as the user wrote it, without the subclasses that replace the class."""
    made = (FSDPModule, CheckpointedForward, PreparedForward)
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, made))


def _choose_by_class(
    modules: dict[str, nn.Module], wanted: tuple[str, ...], models: list[nn.Module], asked: str
) -> list[str]:
    there = [(name, m) for model in models for name, m in model.named_modules() if _has_parameters(m)]
    classes = {class_name(module) for _, module in there}
    if unknown := [word for word in wanted if not any(_is_meant(word, *one) for one in there)]:
        patterns = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name, _ in there})
        near = [name for word in unknown for name in get_close_matches(word, patterns)]
        raise ValueError(
            f"{asked}={', '.join(unknown)}: no model has a module with parameters of that class or name; there are "
            f"{', '.join(sorted(classes)) or 'none'}{'; names near to it: ' * bool(near)}{', '.join(near)}"
        )
    held = [module for _, module in there if _is_container(module)]
    containers = {class_name(module) for module in held}
    if odd := [word for word in wanted if any(_is_meant(word, *one) and one[1] in held for one in there)]:
        raise ValueError(
            f"{asked}={', '.join(odd)}: a container has no forward of its own; name the class of the "
            f"modules in it, one of {', '.join(sorted(classes - containers))}"
        )
    return [name for name, module in modules.items() if any(_is_meant(word, name, module) for word in wanted)]


def _is_meant(word: str, name: str, module: nn.Module) -> bool:
    """Return whether a word is a module's class or fits its name, part by part: layers.*.mlp."""
    parts, patterns = name.split("."), word.split(".")
    fits = len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
    return fits or class_name(module) == word


def _choose_by_size(model: nn.Module, least: int) -> list[str]:
    """Return the modules that hold at least `least` elements beyond those of the blocks inside them."""
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


def _is_listed(model: nn.Module, name: str) -> bool:
    """Return whether a module is an item of a ModuleList that is not itself nested in another list."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return [one for one in around if isinstance(one, nn.ModuleList)] == around[-1:]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _find_shared_outside(model: nn.Module, block: str) -> str | None:
    """Return the name of a parameter outside a block that the block shares; None if no parameter is shared."""
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
    """Return the names with nested modules before the modules around them, otherwise in the same order."""
    ordered: list[str] = []
    for name in names:
        around = next((i for i, n in enumerate(ordered) if name.startswith(f"{n}.")), len(ordered))
        ordered.insert(around, name)
    return ordered


def without_blocks(plan: BlockPlan, model: nn.Module, excluded: frozenset[nn.Module]) -> BlockPlan:
    """Return a plan without the blocks that are among the excluded modules."""
    blocks = tuple(name for name in plan.blocks if model.get_submodule(name) not in excluded)
    return replace(plan, blocks=blocks)


def with_blocks(plan: BlockPlan, added: Iterable[str]) -> BlockPlan:
    """Return a plan with more blocks, by name."""
    return replace(plan, blocks=tuple(_inner_first(list(dict.fromkeys((*plan.blocks, *added))))))
