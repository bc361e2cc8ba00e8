"""Load and save states of sharded models and their optimizers: shard full values, unify forms across ranks."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.errors import OptimizerStateError
from drivetrain_backends.modules.compile import load_plain_state, plain_state
from drivetrain_backends.modules.packed_weights import packed_entries
from drivetrain_backends.state_dict.block_tensors import (
    Restored,
    as_stored,
    has_parts,
    is_stored,
    values_of_shard,
)
from drivetrain_backends.state_dict.dtensor import local, write
from drivetrain_state import Context, gather_object
from drivetrain_weights.tensor_box import is_dtensor

# Forms of shards that are no range of whole blocks: with values in floating point, and without.
_CUT, _FIXED = "cut", "fixed"


def load_model(model: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Copy saved tensors into a sharded model, one at a time. Called on all ranks."""
    own = plain_state(model)
    for name in packed_entries(model, own):
        del own[name]
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    kind = type(model).__name__
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint is not of this {kind}: missing {missing[:5]}, unexpected {unexpected[:5]}; build the "
            "model it was saved from"
        )
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    for name, target in tensors.items():
        if state[name].shape != target.shape:
            raise ValueError(
                f"{kind}: {name} is of shape {tuple(target.shape)}, in the checkpoint {tuple(state[name].shape)}"
            )
    for name, target in tensors.items():
        write(target, state[name], device)
    if rest := {name: state[name] for name in own if name not in tensors}:
        load_plain_state(model, rest, strict=False)


def divided_like(
    state: Mapping[str, Mapping[str, Any]], own: Mapping[str, Tensor], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's named state, each tensor sharded like its parameter in `own`. Called on all ranks."""
    return {
        name: {key: _shard_like(value, own.get(name), device) for key, value in kept.items()}
        for name, kept in state.items()
    }


def _shard_like(value: Any, like: Tensor | None, device: torch.device) -> Any:
    """Return a value sharded like `like` if their shapes are equal; other values, such as step counts, unchanged."""
    if not isinstance(value, Tensor) or like is None or value.dim() == 0 or value.shape != like.shape:
        return value
    part = torch.empty_like(like, dtype=value.dtype).detach()
    write(part, value.detach(), device)
    return part


def repoint(optimizer: Optimizer, successors: MutableMapping[Tensor, Tensor]) -> None:
    """Replace parameters by their shards, in the groups and in the state of an optimizer.

    A state of a parameter's shape is sharded like the parameter: each rank keeps its part of its own state.
    """
    for group in optimizer.param_groups:
        group["params"] = [successors.get(p, p) for p in group["params"]]
        turn_off_mixed_foreach(group)
    for parameter in [p for p in optimizer.state if p in successors]:
        state: dict[str, Any] = optimizer.state.pop(parameter)
        shard = successors[parameter]
        restored = Restored(optimizer)
        optimizer.state[shard] = {
            key: restored.restore(as_stored(value), shard)
            if has_parts(value)
            else _shard_like(value, shard, shard.device)
            for key, value in state.items()
        }


def turn_off_mixed_foreach(group: dict[str, Any]) -> None:
    """Have an optimizer step a group one by one: torch's foreach functions do not mix sharded with full tensors."""
    kinds = {isinstance(p, DTensor) for p in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False


def unify_forms(
    optimizer: Optimizer, names: Mapping[Tensor, str], named: dict[str, Any], context: Context
) -> int:
    """Convert the states in `named` whose form differs between ranks to plain values; return how many these are.

    Called on all ranks. A state that can neither be divided nor converted to floating point is refused.
    """
    if type(optimizer).__module__.startswith("torch.optim"):  # one form, and no message for the others
        return 0
    live = {
        (names[parameter], key): value
        for parameter, kept in optimizer.state.items()
        if parameter in names
        for key, value in kept.items()
        if is_dtensor(value)
    }
    forms = {
        (name, key): _form(local(value), named["state"][name][key])
        for (name, key), value in live.items()
        if local(value).numel()
    }
    found: dict[tuple[str, str], set[str]] = {}
    for own in gather_object(context, forms, over="counts"):
        for key, form in own.items():
            found.setdefault(key, set()).add(form)
    differing = [key for key, kinds in found.items() if len(kinds) > 1 or kinds & {_CUT, _FIXED}]
    _check_values(optimizer, [key for key in differing if _FIXED in found[key]])
    parameters = {name: parameter for parameter, name in names.items()}
    for name, key in differing:
        if (name, key) in live:
            named["state"][name][key] = values_of_shard(live[name, key], parameters[name].dtype)
    return len(differing)


def _form(shard: Tensor, stored: Any) -> str:
    """Return a text that identifies the form in which this rank keeps a state."""
    if not has_parts(shard):
        return "plain"
    if is_stored(stored):
        return type(shard).__qualname__
    return _CUT if hasattr(shard, "dequantize") else _FIXED


def _check_values(optimizer: Optimizer, fixed: Sequence[tuple[str, str]]) -> None:
    if fixed:
        name, key = fixed[0]
        raise OptimizerStateError(
            f"{type(optimizer).__name__}: its state {key} of {name} is made of several tensors that FSDP cannot "
            "divide among ranks, and does not dequantize(): a checkpoint could not be resumed. Use the single or ddp "
            "backend, which keep it whole"
        )
