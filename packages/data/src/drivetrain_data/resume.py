"""A loader's position as a handful of integers, and what must agree before it is taken up."""

from collections.abc import Mapping
from typing import Any

from drivetrain_data.errors import DataStateError

STATE_FORMAT = 1


def make_state(
    *,
    epoch: int,
    position: int,
    seed: int,
    identity: Mapping[str, Any],
    fingerprint: str | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """A position as plain values.

    Args:
        epoch: The epoch being read, or the next one if it is read to its end.
        position: What has been received of it, in samples (in batches, where a user's batches are dealt out).
        seed: What the order depends on.
        identity: What must be the same when the state is taken up.
        fingerprint: The dataset's own mark of its content, if it has one.
        extra: What else the source needs.
    """
    return {
        "format": STATE_FORMAT,
        "epoch": epoch,
        "position": position,
        "seed": seed,
        "identity": dict(identity),
        "fingerprint": fingerprint,
        "extra": dict(extra),
    }


def check_state(state: Mapping[str, Any], *, identity: Mapping[str, Any], fingerprint: str | None) -> None:
    """Hold a saved state against the loader that is to take it up.

    Raises:
        DataStateError: It is of a newer format, or of other data or another order; the message says what differs.
    """
    saved_format = state.get("format")
    if not isinstance(saved_format, int):
        raise DataStateError(
            "this is no loader's state: it has no integer 'format'; pass what state_dict() gave"
        )
    if saved_format > STATE_FORMAT:
        raise DataStateError(
            f"the loader's state has format {saved_format}, and this version reads up to {STATE_FORMAT}; "
            "install the drivetrain-data that saved it, or a newer one"
        )
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
