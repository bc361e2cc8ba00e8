"""Load saved values, full or sharded in any way, into a model's shards and those of its optimizers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_backends.modules.compile import load_plain_state, plain_state
from drivetrain_backends.modules.packed_weights import packed_entries
from drivetrain_backends.state_dict.dtensor import write


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
        name: {key: _divided(value, own.get(name), device) for key, value in kept.items()}
        for name, kept in state.items()
    }


def _divided(value: Any, like: Tensor | None, device: torch.device) -> Any:
    """Return a value of a parameter's shape sharded like it; others, such as step counts, are unchanged."""
    if not isinstance(value, Tensor) or like is None or value.dim() == 0:
        return value
    if value.shape != like.shape:
        return value
    part = torch.empty_like(like, dtype=value.dtype)
    write(part, value.detach(), device)
    return part.detach()
