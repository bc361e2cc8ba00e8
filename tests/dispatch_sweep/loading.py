"""The step of the sweep that loads: a folder that a model's own save_pretrained wrote, to where a map says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain_dispatch import init_empty_weights, load_checkpoint_and_dispatch


def loaded(saved: nn.Module, folder: Path, device_map: Mapping[str, str] | str, **options: Any) -> nn.Module:
    """Return the model that a folder describes, in evaluation.

    Args:
        saved: Who wrote the folder.
        folder: It.
        device_map: A map, or how to plan one.
        options: Of `load_checkpoint_and_dispatch`.
    """
    kind: Any = type(saved)
    with init_empty_weights():
        if hasattr(kind, "load_config"):
            model = kind.from_config(kind.load_config(folder))
        else:
            model = kind._from_config(kind.config_class.from_pretrained(folder))
    if hasattr(saved, "generation_config"):
        model.generation_config = saved.generation_config
    return load_checkpoint_and_dispatch(model.eval(), folder, device_map, **options)
