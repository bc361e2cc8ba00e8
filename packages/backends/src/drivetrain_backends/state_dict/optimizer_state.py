"""An optimizer's own `state_dict` keyed by parameter names, so that any backend can load it.

```text
{"state": {name: {key: value}},                        the state of each parameter
 "param_groups": [{"params": [name, ...], **options}],
 "others": {key: value},                               entries of `state` that belong to no parameter
 "beside": {key: value},                               further entries of its state_dict()
 "own": value}                                         the state_dict() itself, if its form is not torch's
```

The last three keys exist only for optimizers that need them. "own" replaces all other keys. Tensors made of several
tensors, such as those of low-bit optimizers, are in the plain form of `block_tensors`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.compat import changes_states, tree_leaves
from drivetrain_backends.errors import OptimizerStateError
from drivetrain_backends.state_dict.block_tensors import Restored, as_stored

# Options that schedulers add, and that optimizers fill in if a state from another version lacks them.
_OPTIONAL = """
    initial_lr max_lr min_lr base_momentum max_momentum swa_lr
    amsgrad capturable decoupled_weight_decay differentiable foreach fused maximize nesterov
"""
_OTHERS, _BESIDE, _OWN = "others", "beside", "own"


def named_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return an optimizer's own `state_dict` by parameter names, in the form that the module's docstring shows."""
    state = name_state(optimizer.state_dict(), named_groups(optimizer, names))
    kept = {key: as_stored(value) for key, value in state.items() if key != "param_groups"}
    return {**state, **kept}


def name_state(own: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` keyed by the parameter names of each of its groups."""
    if not _has_torch_shape(own, names):
        return {"state": {}, "param_groups": [{"params": list(group)} for group in names], _OWN: own}
    saved_groups: Sequence[Mapping[str, Any]] = own["param_groups"]
    groups = [{**saved, "params": list(group)} for saved, group in zip(saved_groups, names, strict=True)]
    by_key = _names_by_key(saved_groups, names)
    state: Mapping[Any, Any] = own["state"]
    named: dict[str, Any] = {
        "state": {by_key[key]: dict(kept) for key, kept in state.items() if key in by_key},
        "param_groups": groups,
    }
    extra = {
        _OTHERS: {key: value for key, value in state.items() if key not in by_key},
        _BESIDE: {key: value for key, value in own.items() if key not in ("state", "param_groups")},
    }
    return named | {key: value for key, value in extra.items() if value}


def named_groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """Return the names of the parameters of each of an optimizer's groups."""
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def load_named_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], state: Mapping[str, Any]
) -> list[str]:
    """Load a result of `named_state` through the optimizer's own `load_state_dict`, after `check_named_state`.

    Return warnings about states that could not keep their form.
    """
    check_named_state(optimizer, names, state)
    restored = Restored(optimizer)
    if _OWN in state:
        optimizer.load_state_dict(restored.restore(state[_OWN], None))
        return restored.notes()
    parameters = {name: parameter for parameter, name in names.items()}
    own = named_groups(optimizer, names)
    positions = {name: index for index, name in enumerate(name for group in own for name in group)}
    groups = [
        {
            **_convert_as_built(live, saved),
            "params": _as_range(optimizer, [positions[name] for name in group]),
        }
        for live, saved, group in zip(optimizer.param_groups, state["param_groups"], own, strict=True)
    ]
    by_key = {
        positions[name]: restored.restore(dict(value), parameters.get(name))
        for name, value in state["state"].items()
    }
    rest = restored.restore({key: state.get(key, {}) for key in (_OTHERS, _BESIDE)}, None)
    optimizer.load_state_dict({"state": {**by_key, **rest[_OTHERS]}, "param_groups": groups, **rest[_BESIDE]})
    return restored.notes()


def _as_range(optimizer: Optimizer, positions: list[int]) -> Sequence[int]:
    """Return positions in a form that torch's own load searches at once, and not by a walk through a list."""
    found = range(positions[0], positions[-1] + 1) if positions else range(0)
    return found if _loads_as_torch(optimizer) and list(found) == positions else positions


def _convert_as_built(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved options; a number becomes a tensor or plain as in `live`, since some optimizers take only one."""
    options = dict(saved)
    for key, value in saved.items():
        mine = live.get(key)
        if isinstance(mine, Tensor) and isinstance(value, (int, float)):
            options[key] = torch.full_like(mine, value)
        elif isinstance(mine, float) and isinstance(value, Tensor) and not value.dim():
            options[key] = value.item()
    return options


def check_named_state(optimizer: Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Any]) -> None:
    """Refuse a named state that does not fit the optimizer that will load it."""
    mine = name_state(optimizer.state_dict(), named_groups(optimizer, names))
    kind = type(optimizer).__name__
    if (_OWN in mine) != (_OWN in saved):
        raise ValueError(
            f"the state of {kind} is {_form(mine)}, and the checkpoint's {_form(saved)}: it was saved with another "
            "kind of optimizer; build the one that was saved"
        )
    own = named_groups(optimizer, names)
    check_groups(own, saved["param_groups"], optimizer, only_parameters=_OWN in saved)
    in_order = [list(group["params"]) for group in saved["param_groups"]] == own
    if not in_order and any(_may_be_by_place(saved.get(key)) for key in (_OWN, _BESIDE, _OTHERS)):
        raise ValueError(
            f"the checkpoint holds state of {kind} beside its parameters', in the order that they had, and they "
            "stand in another order now; build the optimizer over the same parameters in the same order"
        )
    mine_beside, saved_beside = mine.get(_BESIDE, {}), saved.get(_BESIDE, {})
    lacking = sorted(map(str, mine_beside.keys() - saved_beside.keys()))
    lost = sorted(map(str, saved_beside.keys() - mine_beside.keys()))
    if lacking or (lost and _loads_as_torch(optimizer)):
        what = (
            f"has {lacking}, which the checkpoint has not" if lacking else f"has not {lost} of the checkpoint"
        )
        raise ValueError(
            f"the state_dict() of {kind} {what}: it was saved with another kind of optimizer; build the one that was "
            "saved"
        )


def check_groups(
    own: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    optimizer: Optimizer,
    *,
    only_parameters: bool = False,
) -> None:
    """Refuse saved parameter groups that differ from an optimizer's; `only_parameters` ignores their options."""
    if len(saved) != len(own):
        raise ValueError(
            f"the optimizer has {len(own)} parameter groups, the checkpoint {len(saved)}; build it with the same "
            "groups"
        )
    for group, saved_group in zip(own, saved, strict=True):
        if odd := sorted(set(group) ^ set(saved_group["params"])):
            raise ValueError(
                f"a parameter group of the optimizer differs from the checkpoint's by {odd[:5]}"
                f"{' and others' if len(odd) > 5 else ''}; build it over the same parameters"
            )
    for group, saved_group in zip(optimizer.param_groups, saved if not only_parameters else (), strict=False):
        if lacking := sorted(set(group) - set(saved_group) - set(_OPTIONAL.split())):
            raise ValueError(
                f"the optimizer's groups have {lacking}, which the checkpoint's have not: it was saved with another "
                f"kind of optimizer than {type(optimizer).__name__}; build the one that was saved"
            )


def check_divisible(optimizer: Optimizer, *, where: str, scalars: bool) -> None:
    """Refuse an optimizer with state that the backend `where` cannot divide among ranks.

    A sharding backend divides the state of each parameter. It could save only one rank's part of any other state.
    With `scalars`, plain values are allowed, because they are the same on all ranks.
    """
    places = [
        [f"{g}.{i}" for i, _ in enumerate(group["params"])] for g, group in enumerate(optimizer.param_groups)
    ]
    state = name_state(optimizer.state_dict(), places)
    beside: dict[object, Any] = {**state.get(_OTHERS, {}), **state.get(_BESIDE, {})}
    found = ["all of it"] if _OWN in state else []
    found += [str(key) for key, value in beside.items() if not scalars or _holds_elements(value)]
    if found:
        raise _undividable(optimizer, found, where)


def check_unkeyed(optimizer: Optimizer, *, where: str) -> None:
    """Refuse an optimizer whose `state` has gained entries that belong to no parameter; see `check_divisible`."""
    keys: list[object] = list(optimizer.state)  # torch types the keys as tensors; a user's class may use any
    if found := [str(key) for key in keys if not isinstance(key, Tensor)]:
        raise _undividable(optimizer, found, where)


def _undividable(optimizer: Optimizer, found: Sequence[str], where: str) -> OptimizerStateError:
    return OptimizerStateError(
        f"{type(optimizer).__name__}: its state_dict() holds {list(found[:5])} beside what it keeps of each "
        f"parameter, and {where} cannot divide that among ranks: a checkpoint could not be resumed. Use the single "
        "or ddp backend, or keep it in optimizer.state[parameter] or as an option in param_groups"
    )


def refuse_undivided(saved: Mapping[str, Any], *, where: str) -> None:
    """Refuse a saved state that holds more than the state of each parameter."""
    if extra := [key for key in (_OTHERS, _BESIDE, _OWN) if key in saved]:
        held = [str(key) for kept in extra if kept != _OWN for key in saved[kept]]
        raise ValueError(
            f"the checkpoint holds state of its optimizer beside that of each parameter ({held or 'all of it'}), "
            f"which {where} cannot take up; load it under the single or ddp backend"
        )


def _has_torch_shape(own: Mapping[str, Any], names: Sequence[Sequence[str]]) -> bool:
    """Return whether a state has torch's form: `param_groups`, and `state` by parameter."""
    groups, state = own.get("param_groups"), own.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping) or len(groups) != len(names):
        return False
    found = cast("list[Any]", groups)
    if not all(isinstance(group, Mapping) and "params" in group for group in found):
        return False
    if any(len(group["params"]) != len(own_names) for group, own_names in zip(found, names, strict=True)):
        return False
    by_key = _names_by_key(found, names)
    kept = cast("Mapping[Any, Any]", state)
    return all(isinstance(value, Mapping) for key, value in kept.items() if key in by_key)


def _names_by_key(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Return the name of each parameter by its key in a state."""
    return {
        key: name
        for saved, group in zip(groups, names, strict=True)
        for key, name in zip(saved["params"], group, strict=True)
    }


def _loads_as_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer loads a state only by torch's own method, which drops unknown entries."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and not changes_states(optimizer)


def _form(state: Mapping[str, Any]) -> str:
    return "of a form of its own" if _OWN in state else "kept by parameter"


def _may_be_by_place(extra: Any) -> bool:
    """Return whether part of a state may depend on the order of the parameters; False for scalars by key."""
    if not isinstance(extra, Mapping):
        return extra is not None
    kept = cast("Mapping[Any, Any]", extra)
    return any(isinstance(one, (Mapping, list, tuple)) or _holds_elements(one) for one in kept.values())


def _holds_elements(value: Any) -> bool:
    """Return whether a value contains a tensor or array of more than one element."""
    return any(math.prod(one.shape) > 1 for one in tree_leaves(value) if hasattr(one, "shape"))
