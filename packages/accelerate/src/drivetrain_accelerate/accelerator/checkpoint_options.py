"""The options of Accelerate's `save_state` and `load_state` that drivetrain's checkpoints have no use for."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_PLACES = (None, "cpu", "on_device")


def check_save_options(*, safe_serialization: bool, others: Mapping[str, Any], is_main: bool) -> None:
    """Warn on the main process of options of a save that change nothing."""
    if not is_main:
        return
    if not safe_serialization:
        logger.warning(
            "save_state(safe_serialization=False) changes nothing: checkpoints hold safetensors and no pickle; "
            "save_model(safe_serialization=False) writes pytorch_model.bin"
        )
    if others:
        logger.warning("save_state(): %s: changes nothing here", ", ".join(f"{name}=" for name in others))


def check_load_options(
    load_kwargs: Mapping[str, Any] | None, others: Mapping[str, Any], *, is_main: bool
) -> None:
    """Refuse options of a load that would change its result, and warn on the main process of those that do not."""
    if unknown := sorted(set(others) - {"strict", "map_location"}):
        raise TypeError(f"load_state(): unknown arguments {', '.join(unknown)}: say strict or map_location")
    if not others.get("strict", True):
        raise ValueError(
            "load_state(strict=False): a checkpoint is loaded whole, into the models that it was saved from; to take "
            "weights over into other models, write them with save_model() and use load_checkpoint_in_model()"
        )
    if others.get("map_location") not in _PLACES:
        raise ValueError(f"load_state(map_location={others['map_location']!r}): say cpu, on_device or None")
    without_use = [
        f"load_kwargs[{name!r}]" for name, value in (load_kwargs or {}).items() if not _is_so(name, value)
    ]
    if others.get("map_location") is not None:
        without_use.append("map_location")
    if without_use and is_main:
        logger.warning(
            "load_state(): %s: changes nothing: tensors alone are read, each to where it belongs",
            ", ".join(without_use),
        )


def _is_so(name: str, value: Any) -> bool:
    """Return whether an argument of `torch.load` asks for what is done anyway."""
    return (name, value) == ("weights_only", True)
