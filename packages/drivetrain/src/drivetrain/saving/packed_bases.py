"""Frozen weights that bitsandbytes or torchao packed, such as the 4-bit base of adapters, in checkpoints of a run."""

from typing import Any

from drivetrain_backends import Prepared, is_packed, packed_entries


def scales_of(one: Prepared) -> frozenset[str]:
    """Return the names in a model's state that are scales of packed weights, which nothing loads back."""
    return packed_entries(one.unwrap(), one.state_dict()["model"])


def without_scales(one: Prepared) -> dict[str, Any]:
    """Return a model's state without the scales of packed weights, which the model keeps as they are."""
    left_out = scales_of(one)
    return {name: value for name, value in one.state_dict()["model"].items() if name not in left_out}


def check_packed(one: Prepared) -> None:
    """Check that a checkpoint of all weights could be loaded."""
    packed = {name: each for name, each in one.unwrap().named_parameters() if is_packed(each)}
    if packed:
        name, weight = next(iter(packed.items()))
        library = type(weight).__module__.partition(".")[0]
        raise ValueError(
            f"save_state(): {name!r} (and {len(packed) - 1} more) is packed by {library}, whose scales "
            "could not be loaded into it: save_state(trained_only=True) leaves out what is frozen; the run that "
            "loads it builds the same base"
        )
