"""Models compiled by `torch.compile`, whole or module by module, under the names of the plain model.

`torch.compile(module)` returns a wrapper that holds the module as `_orig_mod`, which becomes part of every name.
Checkpoints leave it out, so that a compiled and a plain model load each other's. (`module.compile()` keeps names.)
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain_backends.compat import COMPILED_MODULE, has_load_hooks
from drivetrain_backends.modules.packed_weights import packed_entries


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` wrapper; a module without one is returned as it is."""
    # Not by isinstance: importing the wrapper's type loads the whole compiler.
    return getattr(model, COMPILED_MODULE) if COMPILED_MODULE in dict(model.named_children()) else model


def strip_wrapper_prefix(name: str) -> str:
    """Return the name of a parameter or buffer without the parts that torch.compile adds."""
    return name.replace(f"{COMPILED_MODULE}.", "")


def plain_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return a model's `state_dict` under plain names; with `keep_vars` the parameters themselves."""
    state = model.state_dict(keep_vars=keep_vars)
    if not any(COMPILED_MODULE in name for name in state):
        return state
    return {strip_wrapper_prefix(name): value for name, value in state.items()}


def load_plain_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a `state_dict` of a compiled or plain model; unless `strict`, it may be partial."""
    own = {strip_wrapper_prefix(name): name for name in model.state_dict()}
    named = {own.get(strip_wrapper_prefix(name), name): value for name, value in state.items()}
    model.load_state_dict(named, strict=strict)


def check_plain_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Compare the names and shapes of a `state_dict`, of a compiled or plain model, with those of a model.

    Checked first because torch loads the tensors that fit before it reports those that do not.

    Raises:
        ValueError: The names or shapes differ.
    """
    own, saved = plain_state(model), {strip_wrapper_prefix(name): value for name, value in state.items()}
    kind = type(unwrap_compiled(model)).__name__
    for name in packed_entries(model, own):
        del own[name]
    if own.keys() != saved.keys() and not any(map(has_load_hooks, model.modules())):
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        raise ValueError(
            f"the checkpoint is not of this {kind}: missing {missing[:5]}, unexpected {unexpected[:5]}; build the "
            "model it was saved from"
        )
    for name, value in own.items():
        there = saved.get(name)
        if isinstance(value, Tensor) and isinstance(there, Tensor) and value.shape != there.shape:
            raise ValueError(
                f"{kind}: {name} is of shape {tuple(value.shape)}, in the checkpoint {tuple(there.shape)}"
            )
