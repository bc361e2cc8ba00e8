"""Match another library's states of models and optimizers with this run's names and shapes."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from drivetrain_backends import strip_wrapper_prefix
from drivetrain_backends.state_dict.optimizer_state import name_state
from drivetrain_checkpoint import ExportedTensors
from drivetrain_weights import find_ties

# torch's names of optimizer states that have one value for each element of a parameter.
_OF_ELEMENTS = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "mu",
    "prev", "square_avg", "step_size", "sum",
}  # fmt: skip
# Options that schedulers add to an optimizer's groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def match_model(saved: Mapping[str, Any], own: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return saved tensors under the names of this model, without reading tensors that are loaded on demand.

    A tied weight may be saved under any of its names. If other module state than tensors was not saved, it is kept.
    """
    kind = type(model).__name__
    ties = find_ties(model, rename=strip_wrapper_prefix)
    there = {strip_wrapper_prefix(name): name for name in saved}
    first: dict[str, str] = {}
    for name in own:
        if name in there:
            first.setdefault(ties.get(name, name), name)
    sources = {
        name: there[name if name in there else first[ties.get(name, name)]]
        for name in own
        if name in there or ties.get(name, name) in first
    }
    missing = sorted(name for name in own if name not in sources and hasattr(own[name], "shape"))
    unexpected = sorted(there.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint is not of this {kind}: missing {missing[:5]}, unexpected {unexpected[:5]}; build the "
            "model it was saved from"
        )
    for name, source in sources.items():
        if not hasattr(own[name], "shape"):
            continue
        # An export's header has the shape: the tensor need not be read.
        is_export = isinstance(saved, ExportedTensors)
        shape = saved.places[source].info.shape if is_export else tuple(getattr(saved[source], "shape", ()))
        if shape != tuple(own[name].shape):
            raise ValueError(
                f"{kind}: {name} is of shape {tuple(own[name].shape)}, in the checkpoint {shape}; build the model it "
                "was saved from"
            )
    kept = {name: value for name, value in own.items() if name not in sources}
    if isinstance(saved, ExportedTensors) and not kept:
        return saved.renamed(sources)
    return kept | {name: saved[source] for name, source in sources.items()}


def match_optimizer(
    saved: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
    clone: bool,
) -> dict[str, Any]:
    """Return an optimizer's saved state under its parameters' names, in the format that a backend loads.

    Args:
        saved: A state dict of torch, with parameters by index in the order of the groups, or by name as under FSDP.
        own: The groups of this run's optimizer, with parameters by name.
        shapes: The full shapes of the parameters, by name.
        kind: The optimizer's name in messages.
        clone: Whether to copy also the tensors of a parameter's shape. Without a copy they stay in the file's memory.
    """
    if not {"state", "param_groups"} <= saved.keys():  # a format of the optimizer's own
        return name_state(saved, [group["params"] for group in own])
    groups: list[Mapping[str, Any]] = saved["param_groups"]
    if len(groups) != len(own):
        raise ValueError(
            f"{kind} has {len(own)} parameter groups, the checkpoint {len(groups)}: build it with the same groups"
        )
    named: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for number, (group, own_group) in enumerate(zip(groups, own, strict=True)):
        there = group.keys() - own_group.keys() - _OF_SCHEDULERS
        here = own_group.keys() - group.keys() - _OF_SCHEDULERS
        if there and here:  # extra options on one side alone are those of a later torch
            raise ValueError(
                f"the checkpoint's optimizer has {sorted(there)}, and {kind} {sorted(here)}: build the optimizer "
                "that was saved"
            )
        names = _names(group["params"], own_group["params"], f"{kind}, group {number}")
        named.append({**own_group, **group, "params": list(own_group["params"])})
        for key, name in names.items():
            kept = cast("Mapping[str, Any]", saved["state"].get(key, {}))
            for what, value in kept.items():
                _check_shape(kind, name, what, value, shapes[name])
            if kept:
                # Backends load values of another shape than the parameter's, such as step counts, unchanged.
                state[name] = {
                    what: value.clone()
                    if isinstance(value, Tensor) and (clone or tuple(value.shape) != shapes[name])
                    else value
                    for what, value in kept.items()
                }
    whole = name_state(saved, [group["params"] for group in own])
    extra = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": named, **extra}


def steps_of(state: Mapping[str, Any]) -> int | None:
    """Return the number of steps in an optimizer's per-parameter state; None if the optimizer counts none."""
    counts = [int(kept["step"]) for kept in state["state"].values() if "step" in kept]
    return max(counts, default=None)


def _names(saved: Sequence[Any], own: Sequence[str], where: str) -> dict[Any, str]:
    """Return each saved parameter's name by its key; if keys are indices, take the run's name at that index."""
    if len(saved) != len(own):
        raise ValueError(
            f"{where} has {len(own)} parameters, in the checkpoint {len(saved)}: build it over the same parameters"
        )
    if not all(isinstance(key, str) for key in saved):
        return dict(zip(saved, own, strict=True))
    if odd := sorted({strip_wrapper_prefix(key) for key in saved} ^ set(own)):
        raise ValueError(
            f"{where} differs from the checkpoint's by {odd[:5]}: build it over the same parameters"
        )
    return {key: strip_wrapper_prefix(key) for key in saved}


def _check_shape(kind: str, name: str, what: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return
    found = tuple(value.shape)
    is_like = len(found) == len(shape) and all(f in (1, s) for f, s in zip(found, shape, strict=True))
    if found != shape and (what in _OF_ELEMENTS or (len(found) == len(shape) and not is_like)):
        raise ValueError(
            f"{kind}: {what} of {name} is of shape {found} in the checkpoint, and the parameter {shape}: prepare and "
            "group the same parameters in the same order"
        )
