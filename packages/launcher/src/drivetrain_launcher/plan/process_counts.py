"""The number of processes, which two settings can give: the setting of the stronger layer counts (pure)."""

from drivetrain_config import Layers
from drivetrain_config.settings.layers import PRECEDENCE

_FIELDS = ("num_processes", "processes_per_node")


def settle_process_counts(layers: Layers) -> Layers:
    """Return the layers without a number of processes that a stronger layer overrides by the other setting.

    `--processes-per-node` overrides `num_processes` of a file, as `--num-processes` would. If one layer has
    both numbers, both stay, and are compared later.
    """
    said = layers.of_section("launch")
    places = {field: PRECEDENCE.index(said[field][0].source.kind) for field in _FIELDS if field in said}
    weaker = {("launch", field) for field, place in places.items() if place > min(places.values())}
    if not weaker:
        return layers
    return Layers({key: said for key, said in layers.entries.items() if key not in weaker}, layers.file)
