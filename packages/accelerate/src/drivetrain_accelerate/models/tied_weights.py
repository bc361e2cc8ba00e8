"""Weights that several modules share."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from drivetrain_accelerate.compat import tied_weights_keys
from drivetrain_dispatch.model.sizes import nearest_entry
from drivetrain_weights import find_tied_parameters as find_groups
from drivetrain_weights import retie_parameters as tie_groups

_LOGGER = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of each parameter that has several.

    Args:
        model: The model to search.
        kwargs: Accepted and without effect, as in Accelerate.
    """
    del kwargs
    return find_groups(model)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one parameter again: the first of them that has values.

    Raises:
        TiedParametersError: Two parameters of a group have different values, so that one would be lost.
    """
    tie_groups(model, [list(group) for group in tied_params])


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
