"""The user's objects that are saved with a run, with one state for all ranks or a state for each rank."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from drivetrain_state import Context, gather_object

logger = logging.getLogger(__name__)

_SAMPLE = 1024  # elements of a tensor that are compared over ranks
_DIVIDED = (
    "full_tensor",
    "held_boxes",
    "flat_range",
)  # a tensor of a state that ranks divide has one of these


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved; its state is nested plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to save."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Load a saved state."""
        ...


@runtime_checkable
class Mergeable(Protocol):
    """An object with a state on each rank that can be loaded at another number of ranks."""

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> Any:
        """Load the states of all ranks that saved, in rank order. Called on all ranks."""
        ...


class Registered:
    """The objects given to `register_for_checkpointing`.

    Attributes:
        shared: Objects whose state is the same on all ranks, by name; rank 0's is saved.
        per_rank: Objects with a state of their own on each rank, by name.
        told: The names of shared objects whose differing states were already reported.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Stateful] = {}
        self.per_rank: dict[str, Stateful] = {}
        self.told: set[str] = set()

    def __len__(self) -> int:
        return len(self.shared) + len(self.per_rank)

    def add(self, objects: Sequence[object], named: Mapping[str, object], *, per_rank: bool) -> None:
        """Add objects under their numbers or names.

        Raises:
            TypeError: An object lacks `state_dict` or `load_state_dict`, or `per_rank` is not a bool.
            ValueError: A name is taken.
        """
        if type(per_rank) is not bool:
            raise TypeError(
                f"register_for_checkpointing(per_rank={per_rank!r}): must be True or False; an object cannot be "
                "registered under this name"
            )
        taken = {**self.shared, **self.per_rank}
        start = sum(name.startswith("object_") for name in taken)
        kept = self.per_rank if per_rank else self.shared
        for name, obj in {**{f"object_{start + i}": obj for i, obj in enumerate(objects)}, **named}.items():
            if not isinstance(obj, Stateful):
                raise TypeError(
                    f"register_for_checkpointing: {type(obj).__name__} has no state_dict() and load_state_dict(); "
                    "give it both, returning plain values and tensors"
                )
            if name in taken:
                raise ValueError(f"register_for_checkpointing({name}=...): the name is taken; choose another")
            kept[name] = obj

    def remove(self, objects: Sequence[object]) -> None:
        """Remove objects under all of their names; ignore objects that are not registered."""
        for kept in (self.shared, self.per_rank):
            for name in [name for name, held in kept.items() if any(held is one for one in objects)]:
                del kept[name]

    def compare(self, states: Mapping[str, Any], context: Context) -> None:
        """Compare the registered objects over ranks. Called on all ranks.

        If an object's state differs between ranks, a warning says so once. Tensors are compared by shape, dtype and a
        sample of their elements.

        Args:
            states: The states of the shared objects, by name.
            context: The context of this process.

        Raises:
            RuntimeError: Ranks have registered different objects.
        """
        if context.topology.world_size == 1:
            return
        sums = {name: _checksum(state) for name, state in states.items()}
        found: list[tuple[dict[str, str], list[str]]] = gather_object(context, (sums, sorted(self.per_rank)))
        held = [(sorted(shared), own) for shared, own in found]
        if any(one != held[0] for one in held):
            named = "; ".join(
                f"rank {rank}: {', '.join([*shared, *(f'{name} (per_rank)' for name in own)]) or 'none'}"
                for rank, (shared, own) in enumerate(held[:8])
            )
            raise RuntimeError(
                f"register_for_checkpointing() was called with other objects on some ranks ({named}): call it on all "
                "ranks with the same objects, outside `if accelerator.is_main_process`; nothing was saved"
            )
        for name in states:
            others = [rank for rank, (shared, _) in enumerate(found) if shared[name] != found[0][0][name]]
            if not others or name in self.told:
                continue
            self.told.add(name)
            if context.topology.is_main:
                logger.warning(
                    "the state of the registered object %r (%s) differs on ranks %s from that of rank 0, which "
                    "alone is saved, and loaded on every rank: register it with per_rank=True to keep each "
                    "rank's own, or make it the same before a save",
                    name,
                    type(self.shared[name]).__name__,
                    others,
                )


def gathered_states(
    states: Mapping[str, Any], objects: Mapping[str, Stateful], context: Context
) -> dict[str, Any]:
    """Gather the states of mergeable objects from all ranks, in rank order; return None for other objects.

    Called on all ranks.
    """
    mergeable = {name: state for name, state in states.items() if isinstance(objects[name], Mergeable)}
    if not mergeable:
        return dict.fromkeys(states)
    ranks = gather_object(context, mergeable)
    return {name: [one[name] for one in ranks] if name in mergeable else None for name in states}


def check_loadable(
    objects: Mapping[str, Stateful], saved: Mapping[str, Any], *, saved_world_size: int, world_size: int
) -> None:
    """Refuse to load states of another number of ranks into objects that cannot merge states.

    Args:
        objects: The objects with a state on each rank, by name.
        saved: The result of `gathered_states` at the save.
        saved_world_size: The number of ranks that saved.
        world_size: The number of ranks now.

    Raises:
        ValueError: Some objects cannot merge their states; the message names them.
    """
    if saved_world_size == world_size:
        return
    if lost := [
        name for name, obj in objects.items() if saved[name] is None or not isinstance(obj, Mergeable)
    ]:
        raise ValueError(
            f"the registered objects {lost} have a state of their own on each of the {saved_world_size} ranks that "
            f"saved, and there are {world_size} now: resume with {saved_world_size}; or give them, before the save, "
            "a method load_state_dicts(states), which takes the states of all ranks that saved"
        )


def _checksum(state: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if any(hasattr(value, name) for name in _DIVIDED):  # of which each rank has its own part
        digest.update(f"divided {tuple(value.shape)}".encode())
    elif isinstance(value, Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        flat = value.detach().reshape(-1)
        digest.update(repr(flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].tolist()).encode())
    elif isinstance(value, Mapping):
        for key, one in cast("Mapping[Any, Any]", value).items():
            digest.update(f"{key!r}:".encode())
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(cast('Sequence[Any]', value))} in".encode())
        for one in cast("Sequence[Any]", value):
            _add(digest, one)
    elif isinstance(value, (set, frozenset)):
        digest.update(repr(sorted(map(repr, cast("set[Any]", value)))).encode())
    else:
        digest.update(repr(value).encode())
