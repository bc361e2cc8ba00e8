"""The text of what a plugin says, by which two of them are compared."""

from collections.abc import Mapping
from typing import Any, cast

# What DeepSpeed's plugin makes of its configuration, or notes while it is used.
_DERIVED = ("hf_ds_config", "dschf")


def shown_plugin(plugin: Any) -> str | None:
    """Return what a plugin, or several by name, say: equal for equal options, and unchanged by later use.

    A text, since some options, such as partial functions, are not equal to others of the same parts.
    """
    if plugin is None:
        return None
    if isinstance(plugin, Mapping):
        named = cast("Mapping[str, Any]", plugin)
        return repr({name: shown_plugin(each) for name, each in named.items()})
    said = {
        name: value
        for name, value in vars(plugin).items()
        if not name.startswith("_") and name not in _DERIVED
    }
    return f"{type(plugin).__name__}: {said!r}"
