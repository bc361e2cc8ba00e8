"""How a run's tensors are divided among ranks: which are the same on all of them, and how one is to be read."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from drivetrain_backends import Prepared, plain_name
from drivetrain_checkpoint import Replica


def mark_replicas(state: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
    """A prepared model's state in which ranks may share the writing of what is the same on all of them.

    Parameters and what an optimizer keeps of them are the same: every rank steps on the same gradients. Buffers may
    not be, as a batch norm's statistics, nor what an optimizer keeps elsewhere; of these rank 0's are written.
    """
    same = {plain_name(name) for name, _ in prepared.unwrap().named_parameters(remove_duplicate=False)}
    model = {
        name: Replica(value) if type(value) is Tensor and name in same else value
        for name, value in cast("Mapping[str, Any]", state["model"]).items()
    }
    return {**state, "model": model, "optimizers": [_of_parameters(one) for one in state["optimizers"]]}


def _of_parameters(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's named state, its parameters' part marked."""
    return {
        key: _replicated(value) if key in ("state", "param_groups") else value
        for key, value in optimizer.items()
    }


def _replicated(value: Any) -> Any:
    if type(value) is Tensor:
        return Replica(value)
    if isinstance(value, Mapping):
        return {key: _replicated(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    return value


def as_in(named: Mapping[str, Prepared]) -> Callable[[str], Any]:
    """How each tensor of a checkpoint is divided here, by its name there: as the parameter it belongs to."""
    own = {model: prepared.state_dict()["model"] for model, prepared in named.items()}

    def like(name: str) -> Any:
        kind, _, rest = name.partition("/")
        if kind == "models":
            model, _, parameter = rest.partition("/")
            return own.get(model, {}).get(parameter)
        kind, _, rest = rest.partition("/")  # training/MODEL/optimizers/INDEX/state/PARAMETER/KEY
        model, _, rest = rest.partition("/optimizers/")
        index, _, rest = rest.partition("/state/")
        parameter, _, key = rest.rpartition("/")
        if kind != "training" or not index.isdecimal() or not key:
            return None
        return own.get(model, {}).get(parameter)

    return like
