"""Fill values of a DeepSpeed configuration that are "auto", and compare the others with the run's."""

from collections.abc import Mapping
from typing import Any

from drivetrain_accelerate.plugins.deepspeed_config import HfDeepSpeedConfig


def fill_auto(
    config: HfDeepSpeedConfig, name: str, values: Mapping[str, Any], mismatches: list[str] | None
) -> None:
    """Replace a value that is "auto" by the run's, in place.

    Args:
        config: The configuration to fill.
        name: The dotted name of the value; nothing happens if there is none.
        values: The run's values by dotted name.
        mismatches: The list that a difference is added to; None: it does not count.

    Raises:
        ValueError: The value is "auto", and the run has none.
    """
    node, key = config.find_config_node(name)
    if node is None:
        return
    given = node.get(key)
    if given == "auto":
        if name not in values:
            raise ValueError(
                f"the DeepSpeed configuration leaves {name} to the program ('auto'), which does not say it: write a "
                "value into the configuration"
            )
        node[key] = values[name]
    elif mismatches is not None and given is not None and name in values and given != values[name]:
        mismatches.append(f"- ds {name}={given} vs arg {name}={values[name]}")


def fill_tree(
    config: HfDeepSpeedConfig,
    section: Mapping[str, Any],
    prefix: str,
    values: Mapping[str, Any],
    mismatches: list[str] | None,
) -> None:
    """Replace each value that is "auto" in a section, and in those inside of it, by the run's, in place.

    Args:
        config: The configuration to fill.
        section: The section to go through.
        prefix: The dotted name of the section with a dot at the end; empty for the whole.
        values: The run's values by dotted name.
        mismatches: The list that differences are added to; None: they do not count.
    """
    for key, value in section.items():
        if isinstance(value, Mapping):
            fill_tree(config, value, f"{prefix}{key}.", values, mismatches)
        else:
            fill_auto(config, f"{prefix}{key}", values, mismatches)
