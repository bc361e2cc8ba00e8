"""Weights that several modules share."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain_accelerate.compat import tied_weights_keys
from drivetrain_dispatch.loading.load_target import Assignment, apply_assignments
from drivetrain_dispatch.model.model_layout import nearest_entry
from drivetrain_weights import find_tied_parameters as find_groups
from drivetrain_weights.errors import TiedParametersError

_LOGGER = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    del kwargs
    return find_groups(model)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one parameter or buffer again: the first of them that has values, which stay.

    Raises:
        TiedParametersError: The model lacks a name, or tensors of a group have different shapes; it stays unchanged.
    """
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    kept: list[Tensor | None] = []
    for group in tied_params:
        if missing := [name for name in group if name not in named]:
            raise TiedParametersError(f"tied_params: the model has no parameter {', '.join(missing)}")
        if len({named[name].shape for name in group}) > 1:
            shapes = ", ".join(f"{name} {tuple(named[name].shape)}" for name in group)
            raise TiedParametersError(
                f"tied_params: {shapes}: tensors of one shape can be one; leave others out"
            )
        kept.append(next((named[name] for name in group if not named[name].is_meta), None))
    groups = zip(tied_params, kept, strict=True)
    apply_assignments(model, [Assignment(tuple(group), each) for group, each in groups if each is not None])


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model of transformers says that its embeddings are tied."""
    config: Any = getattr(model, "config", None)
    has_tied = getattr(model, "all_tied_weights_keys", None) or tied_weights_keys(model)
    getter: Any = getattr(config, "get_text_config", None)
    said: Any = config if getter is None else getter(decoder=True)
    ties = any(getattr(each, "tie_word_embeddings", False) for each in (config, said) if each is not None)
    embeds: Any = getattr(model, "get_output_embeddings", None)
    output = embeds() if callable(embeds) else None
    return bool((ties and output is not None) or (has_tied and ties))


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of weights with several names that a device map gives to several devices."""
    for group in tied_params:
        devices = {
            name: device_map[nearest]
            for name in group
            if (nearest := nearest_entry(name, device_map)) is not None
        }
        if len(set(devices.values())) > 1:
            _LOGGER.warning(
                "device_map gives the names of one weight to several devices: %s. Give them to one, or plan the map.",
                devices,
            )
