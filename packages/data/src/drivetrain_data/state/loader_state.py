"""The format of a loader's saved position, and the checks before a loader loads it.

A state is a dict of plain values:
    format: The number of this format.
    epoch: The epoch being read, or the next one if the loop has reached its end.
    position: The number of samples received (of batches, where a user's batches are distributed whole).
    seed: The seed of the order.
    identity: The values that must match when the state is loaded.
    fingerprint: The dataset's own fingerprint of its content; None if it has none.
    extra: The further state that the source needs.
    repeats: The number of samples received beyond the position without a step; absent if there were none.
"""

from collections.abc import Mapping
from typing import Any

from drivetrain_data.errors import DataStateError

STATE_FORMAT = 1


def check_state(state: Mapping[str, Any], *, identity: Mapping[str, Any], fingerprint: str | None) -> None:
    """Raise DataStateError, with the difference, unless a saved state fits this loader."""
    _check_values(state)
    for name, own in identity.items():
        saved = state["identity"].get(name)
        if saved != own:
            raise DataStateError(
                f"the loader's state was saved with {name}={saved!r} and this loader has {own!r}: {_WHY[name]}"
            )
    if None not in (fingerprint, state["fingerprint"]) and fingerprint != state["fingerprint"]:
        raise DataStateError(
            f"the dataset's fingerprint was {state['fingerprint']!r} and is {fingerprint!r}: its content changed; "
            "load the dataset as it was, or start the epoch anew"
        )


def _check_values(state: Mapping[str, Any]) -> None:
    """Check that a state has the format and the values of a saved state."""
    if not hasattr(state, "keys") or not _is_count(state.get("format")):
        given = f"a {type(state).__name__}" if not hasattr(state, "keys") else "one without 'format'"
        raise DataStateError(
            f"this is no loader's state, which is a dict with an integer 'format', but {given}; pass what "
            "state_dict() gave"
        )
    if state["format"] > STATE_FORMAT:
        raise DataStateError(
            f"the loader's state has format {state['format']}, and this version reads up to {STATE_FORMAT}; "
            "install the drivetrain-data that saved it, or a newer one"
        )
    allowed: dict[str, tuple[bool, str]] = {
        "epoch": (_is_count(state.get("epoch")), "a number of epochs, 0 or more"),
        "position": (_is_count(state.get("position")), "a number of samples, 0 or more"),
        "repeats": (_is_count(state.get("repeats", 0)), "a number of samples, 0 or more"),
        "seed": (_is_count(state.get("seed")), "an integer, 0 or more"),
        "identity": (isinstance(state.get("identity"), Mapping), "a mapping"),
        "fingerprint": (isinstance(state.get("fingerprint", 0), str | None), "a string or None"),
        "extra": (isinstance(state.get("extra"), Mapping), "a mapping"),
    }
    for name, (is_right, what) in allowed.items():
        if not is_right:
            told = f"{name}={state[name]!r}" if name in state else f"no {name!r}"
            raise DataStateError(
                f"the loader's state has {told}, which must be {what}: it was damaged or made by hand"
            )
    length = state["identity"].get("num_positions")
    if _is_count(length) and state["position"] > length:
        raise DataStateError(
            f"the loader's state has position={state['position']} in an epoch of {length}: it was damaged or made by "
            "hand"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_WHY = {
    "order": "the samples would come in another order; build the loader with the same sampler, and shard it with the "
    "same strategy",
    "num_samples": "the dataset changed its length; load it as it was, or start the epoch anew",
    "num_positions": "the sampler gives another number of samples; build it as it was, or start the epoch anew",
    "built_from": "the sampler was built from other indices, weights or lengths; build it as it was, or start the "
    "epoch anew",
    "num_batches": "the batch sampler gives another number of batches; build it as it was, or start the epoch anew",
    "batch_size": "a batch sampler goes on in whole batches; build it with the same batch size",
    "num_workers": "each worker reads a part of a stream of its own; use as many workers as before",
}
