"""States of low-bit optimizers over shards: each in the same form on all ranks of a checkpoint.

Such optimizers decide by the size of its shard in how many bits a rank keeps a state. Where shards differ in size, so
may the forms; a checkpoint then holds the values in floating point.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.errors import OptimizerStateError
from drivetrain_backends.state_dict.block_tensors import has_parts, is_stored, values_of_shard
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_state import Context, gather_object
from drivetrain_weights.tensor_box import is_dtensor

# Forms of shards that are no range of whole blocks: with values in floating point, and without.
_CUT, _FIXED = "cut", "fixed"


def unify_forms(
    optimizer: Optimizer, names: Mapping[Tensor, str], named: dict[str, Any], context: Context
) -> int:
    """Replace the states in `named` that ranks keep in different forms by their values. Called on all ranks.

    Returns:
        The number of these states, the same on all ranks.

    Raises:
        OptimizerStateError: A state's parts cannot be divided among ranks, and it has no values in floating point.
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
    for own in gather_object(context, forms):
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
    """Return the form in which this rank keeps a state."""
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
