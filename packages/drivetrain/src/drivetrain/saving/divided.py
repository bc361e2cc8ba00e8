"""The distribution of tensors over ranks: replicated tensors in a save, and the sharding of loaded tensors."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from drivetrain_backends import Prepared, strip_wrapper_prefix
from drivetrain_checkpoint import Proportional, Replicated
from drivetrain_weights import box_of_dtensor
from drivetrain_weights.tensor_box import is_dtensor

NOTHING: Mapping[str, Any] = MappingProxyType({})


def name_parameters(prepared: Prepared) -> dict[str, Tensor]:
    """Return a model's parameters by their names in a checkpoint; a tied parameter has several names."""
    named = prepared.unwrap().named_parameters(remove_duplicate=False)
    return {strip_wrapper_prefix(name): parameter for name, parameter in named}


def mark_replicas(state: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
    """Return a prepared model's state with replicated tensors marked, so that ranks may share the writing.

    Parameters and their optimizer states are replicated: every rank steps on the same gradients. Buffers, such as a
    batch norm's statistics, and other optimizer state may differ; rank 0's are written.
    """
    same = name_parameters(prepared).keys()
    model = {
        name: Replicated(value) if type(value) is Tensor and name in same else value
        for name, value in cast("Mapping[str, Any]", state["model"]).items()
    }
    optimizers = [
        {
            key: _mark_replicated(value) if key in ("state", "param_groups") else value
            for key, value in one.items()
        }
        for one in state["optimizers"]
    ]
    return {**state, "model": model, "optimizers": optimizers}


def _mark_replicated(value: Any) -> Any:
    if type(value) is Tensor:
        return Replicated(value)
    if isinstance(value, Mapping):
        return {key: _mark_replicated(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    return value


def as_in(own: Mapping[str, Mapping[str, Any]], custom: Mapping[str, Any] = NOTHING) -> Callable[[str], Any]:
    """Return a function from a tensor's name in a checkpoint to the parameter whose sharding the tensor takes.

    Args:
        own: The state of each model of this run, by name.
        custom: The registered objects, by name; one with a method `like` names the tensors of its state by it.
    """

    def like(name: str) -> Any:
        kind, _, rest = name.partition("/")
        if kind == "models":
            model, _, parameter = rest.partition("/")
            return own.get(model, {}).get(parameter)
        kind, _, rest = rest.partition("/")  # training/MODEL/optimizers/INDEX/state/PARAMETER/KEY
        if kind == "custom":
            name, _, rest = rest.partition("/")
            return custom[name].like(rest) if hasattr(custom.get(name), "like") else None
        model, _, rest = rest.partition("/optimizers/")
        index, _, rest = rest.partition("/state/")
        parameter, _, key = rest.rpartition("/")
        if parameter.endswith("/parts"):  # of a state made of several tensors, such as codes and scales
            parameter, _, _ = parameter.removesuffix("/parts").rpartition("/")
            sharded = own.get(model, {}).get(parameter)
            # What has an element for each range of a sharded parameter's elements is cut where the parameter is.
            if not is_dtensor(sharded) or (span := box_of_dtensor(sharded).flat_range(sharded.shape)) is None:
                return None
            return Proportional(start=span[0], stop=span[1], of=sharded.numel())
        if kind != "training" or not index.isdecimal() or not key:
            return None
        return own.get(model, {}).get(parameter)

    return like
