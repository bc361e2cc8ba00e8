"""The number of processes, which two settings can say: one of a stronger layer stands for both (pure)."""

from drivetrain_config import Layers
from drivetrain_config.settings.layers import PRECEDENCE

_FIELDS = ("num_processes", "processes_per_node")


def settle_process_counts(layers: Layers) -> Layers:
    """Return the layers without the number of processes that a stronger layer says in the other way.

    `--processes-per-node` overrides `num_processes` of a file, as `--num-processes` would. Numbers of one layer stay,
    to be compared.
    """
    said = layers.of_section("launch")
    places = {field: PRECEDENCE.index(said[field][0].source.kind) for field in _FIELDS if field in said}
    weaker = {("launch", field) for field, place in places.items() if place > min(places.values())}
    if not weaker:
        return layers
    return Layers({key: said for key, said in layers.entries.items() if key not in weaker}, layers.file)
