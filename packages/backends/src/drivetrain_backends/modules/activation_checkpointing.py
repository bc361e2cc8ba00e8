"""Activation checkpointing of modules in place: activations are recomputed in backward.

A module keeps its identity and parameter names: only its class is replaced by a subclass with a checkpointed forward.
Hooks around the forward, such as hooks that gather parameters, run outside the checkpoint.
"""

from collections.abc import Iterable
from functools import partial, wraps
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain_backends.compat import ATTENTION_AND_FP8

Checkpointing = Literal["none", "full", "selective"]
# What selective checkpointing saves: matrix products and attention, the costliest to recompute.
_SAVED = frozenset(
    operation.default
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", *ATTENTION_AND_FP8)
    if (operation := getattr(torch.ops.aten, name, None)) is not None
)
# Arguments of transformers' blocks that forwards write keys and values to, for a later generation: the second forward
# would add them again. Without them nothing is kept.
_WRITTEN = frozenset({"past_key_values", "layer_past"})


class CheckpointedForward:
    """The base of the classes that `checkpoint_activations` makes."""

    unchecked_class: type[nn.Module]  # the class that the subclass replaces
    checkpointing: Checkpointing  # the kind of checkpointing, "full" or "selective"


def checkpoint_activations(modules: Iterable[nn.Module], kind: Checkpointing) -> None:
    """Make modules recompute their activations in backward, in place, one module at a time.

    The kind "full" saves only a module's inputs. "selective" also saves the outputs of matrix products and attention.
    "none" changes nothing. A module that already checkpoints its activations is refused.
    """
    made: dict[type[nn.Module], type[nn.Module]] = {}  # one of each: torch.compile compiles for a class
    for module in modules:
        if kind == "none":
            continue
        original = type(module)
        if issubclass(original, CheckpointedForward):
            raise ValueError(
                f"{original.__name__} already checkpoints its activations: enable it in the settings or in the model"
            )
        if original not in made:
            made[original] = _make_checkpointed_class(original, kind)
        module.__class__ = made[original]


def restore_activations(module: nn.Module) -> None:
    """Undo `checkpoint_activations` in place; do not change a module without checkpointing."""
    if isinstance(module, CheckpointedForward):
        module.__class__ = module.unchecked_class  # pyright: ignore[reportAttributeAccessIssue]


def checkpointing_of(module: nn.Module) -> Checkpointing:
    """Return the kind of a module's checkpointing, read back from its class."""
    return module.checkpointing if isinstance(module, CheckpointedForward) else "none"


def _make_checkpointed_class(original: type[nn.Module], kind: Checkpointing) -> type[nn.Module]:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    run = checkpoint if kind == "full" else partial(checkpoint, context_fn=contexts)

    @wraps(original.forward)  # whose signature callers may read
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original.forward(self, *args, **kwargs)
        kwargs |= dict.fromkeys(_WRITTEN.intersection(kwargs))
        return run(partial(original.forward, self), *args, use_reentrant=False, **kwargs)

    members = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "unchecked_class": original,
        "checkpointing": kind,
    }
    return cast("type[nn.Module]", type(original.__name__, (CheckpointedForward, original), members))


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
