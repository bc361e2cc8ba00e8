"""Models compiled by `torch.compile`, whole or module by module, under the names of the plain model.

`torch.compile(module)` returns a wrapper that holds the module as `_orig_mod`, which becomes part of every name.
Checkpoints leave this part out, so that compiled and plain models share checkpoints. `module.compile()` keeps names.
"""

from collections.abc import Callable, Mapping, Set
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import COMPILED_MODULE, has_load_hooks, loads_its_own_way, modules_in
from drivetrain_backends.modules.packed_weights import packed_entries


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` wrapper; return a module without a wrapper unchanged."""
    # Not by isinstance: importing the wrapper's type loads the whole compiler.
    return getattr(model, COMPILED_MODULE) if COMPILED_MODULE in modules_in(model) else model


def strip_wrapper_prefix(name: str) -> str:
    """Return the name of a parameter or buffer without the parts that torch.compile adds."""
    return name.replace(f"{COMPILED_MODULE}.", "")


def plain_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return a model's `state_dict` under plain names; with `keep_vars`, values are the parameters themselves."""
    state = model.state_dict(keep_vars=keep_vars)
    if not any(COMPILED_MODULE in name for name in state):
        return state
    return {strip_wrapper_prefix(name): value for name, value in state.items()}


def load_plain_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a `state_dict` of a compiled or plain model; unless `strict`, the state may be partial.

    torch looks through all names at each module: 20,000 small tensors take minutes. Tensors that only need a copy are
    therefore copied here.
    """
    held = model.state_dict(keep_vars=True)
    own = {strip_wrapper_prefix(name): name for name in held}
    named = {own.get(strip_wrapper_prefix(name), name): value for name, value in state.items()}
    tensors = _tensors_of(model)
    is_copied = all(
        isinstance(value, Tensor) and held.get(name) in tensors and held[name].shape == value.shape
        for name, value in named.items()
    )
    if not is_copied or (strict and named.keys() != held.keys()):
        model.load_state_dict(named, strict=strict)
        return
    with torch.no_grad():
        for name, value in named.items():
            held[name].copy_(value)


def _tensors_of(model: nn.Module) -> Set[Tensor]:
    """Return the parameters and buffers into which a load only copies; none if a module loads in its own way."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return frozenset()
    if any(map(loads_its_own_way, model.modules())):
        return frozenset()
    return {*model.parameters(), *model.buffers()}


def check_plain_state(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    is_exact: bool = False,
    shape_of: Callable[[Any], torch.Size] = attrgetter("shape"),
) -> None:
    """Compare the names and shapes of a `state_dict`, of a compiled or plain model, with those of a model.

    Call this before a load: torch reports misfits only after it has loaded the tensors that fit. Unless `is_exact`,
    names may differ if a module changes a state before it loads it. `shape_of` returns the full shape of a tensor.
    """
    own = plain_state(model, keep_vars=True)
    saved = {strip_wrapper_prefix(name): value for name, value in state.items()}
    kind = type(unwrap_compiled(model)).__name__
    for name in packed_entries(model, own):
        del own[name]
    if own.keys() != saved.keys() and (is_exact or not any(map(has_load_hooks, model.modules()))):
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        raise ValueError(
            f"the checkpoint is not of this {kind}: missing {missing[:5]}, unexpected {unexpected[:5]}; build the "
            "model it was saved from"
        )
    for name, value in own.items():
        there = getattr(saved.get(name), "shape", None)
        if isinstance(value, Tensor) and there is not None and (shape := shape_of(value)) != there:
            raise ValueError(f"{kind}: {name} is of shape {tuple(shape)}, in the checkpoint {tuple(there)}")
