"""The number of processes, which two settings can say: one of a stronger layer stands for both (pure)."""

from drivetrain_config import Layers

_FIELDS = ("num_processes", "processes_per_node")
_STRENGTH = {"code": 3, "command line": 2, "environment": 1, "file": 0}


def settle_process_counts(layers: Layers) -> Layers:
    """Return the layers without the number of processes that a stronger layer says in the other way.

    A file that says `num_processes` does not contradict `--processes-per-node`, which beats it as `--num-processes`
    would. Numbers of one layer stay, to be compared.
    """
    said = layers.of_section("launch")
    strength = {field: _STRENGTH[said[field][0].source.kind] for field in _FIELDS if field in said}
    weaker = {field for field in strength if strength[field] < max(strength.values())}
    if not weaker:
        return layers
    kept = {
        key: entries for key, entries in layers.entries.items() if key not in {("launch", f) for f in weaker}
    }
    return Layers(kept, layers.file)
