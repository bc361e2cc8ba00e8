"""Values that a user writes into parameters between steps: they must reach the engine's fp32 master weights too."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.errors import AccumulationError, ReplacedParameterError
from drivetrain_backends.modules.parameter_guard import Writes
from drivetrain_deepspeed.compat import flat_groups, read_as_they_are
from drivetrain_messages import list_some
from drivetrain_state import Context, gather_object

_ELEMENTS_AT_ONCE = 2**24


class WrittenValues:
    """A record of the values written into the parameters of one engine since its last step.

    This class is for stage 0, where the optimizer steps the parameters themselves: it records nothing.
    """

    def copy_to_masters(self) -> None:
        """Copy the written values into the masters, before a step. Called on all ranks."""

    def note(self) -> None:
        """Record that parameters and masters agree. Called after the engine or the backend wrote parameters."""

    def compare(self) -> None:
        """Refuse a save if ranks wrote into parameters unequally often. Called on all ranks, before the save."""

    def forget(self) -> None:
        """Reset the counts for `compare`. Called after all ranks have loaded a saved state."""


class WrittenToFlat(WrittenValues):
    """The record for stages 1 and 2: parameters are views of a flat tensor; each rank has a master of its partition.

    The partition is compared with its master, because a write through `.data` leaves no other trace. In half
    precision, an unwritten element keeps its master's extra precision. A rank copies only its own partition, so all
    ranks must write the same values. Saves compare the number of writes to each parameter across ranks; a write
    through `.data` is not counted.
    """

    def __init__(self, engine: Any, names: Mapping[Tensor, str], context: Context) -> None:
        self._flat = flat_groups(engine.optimizer)
        self._parameters = [parameter for group in self._flat.parameters for parameter in group]
        self._places: list[int] = []
        self._names, self._context = names, context
        self._writes = Writes({name: parameter for parameter, name in names.items()})
        self._num_writes: Counter[str] = Counter()
        self.note()

    def copy_to_masters(self) -> None:
        """Copy changed elements to the masters; see `WrittenValues.copy_to_masters`."""
        self._num_writes.update(self._writes.since())
        if self._places != (places := list(map(Tensor.data_ptr, self._parameters))):
            self._bring_back(places)
        flat = self._flat
        for parts, master, ranks in zip(flat.parts, flat.masters, flat.ranks, strict=True):
            own = parts[dist.get_rank(ranks)]
            pieces = [one.detach().split(_ELEMENTS_AT_ONCE) for one in (own, master)]
            for piece, kept in zip(*pieces, strict=True):
                written = piece.to(kept.device)
                rounded = kept.to(written.dtype)
                # If none differ, nothing is written, because a background save may be copying the master.
                if not torch.equal(rounded, written):
                    kept.copy_(torch.where(rounded == written, kept, written.to(kept.dtype)))

    def note(self) -> None:
        """Record the addresses of the parameters; see `WrittenValues.note`."""
        places = list(map(Tensor.data_ptr, self._parameters))
        if places != self._places:
            self._places, self._homes = places, [parameter.data for parameter in self._parameters]
        self._writes.since()

    def compare(self) -> None:
        """Compare the counts; see `WrittenValues.compare`."""
        found: list[Counter[str]] = gather_object(self._context, self._num_writes)
        if all(one == found[0] for one in found):
            return
        names = [name for name in self._names.values() if len({one[name] for one in found}) > 1]
        counts = ", ".join(f"{one[names[0]]} times on rank {rank}" for rank, one in enumerate(found[:8]))
        raise AccumulationError(
            f"{', '.join(names[:5])}: written in place on some ranks and not on others ({names[0]}: {counts}). Under "
            "ZeRO each rank steps a part of every parameter, so that what one rank writes goes into its part "
            "alone. Nothing was saved: load_state() of an earlier checkpoint, and write the same values on all ranks "
            "or inside accelerator.gathered(model, write=True)"
        )

    def forget(self) -> None:
        """Reset the counts to 0; see `WrittenValues.forget`."""
        self._num_writes.clear()

    def _bring_back(self, places: list[int]) -> None:
        """Copy values assigned by `parameter.data = ...` back to the parameter's place in the flat tensor."""
        for parameter, home, before, now in zip(
            self._parameters, self._homes, self._places, places, strict=True
        ):
            if before != now:
                if parameter.dtype != home.dtype:
                    raise ReplacedParameterError(converted([self._names[parameter]]))
                home.copy_(parameter.data)
                parameter.data = home


class WrittenOutsideGathered(WrittenValues):
    """The record for stage 3, where writes outside `gathered(write=True)` reach no master."""

    def __init__(self, engine: Any, names: Mapping[Tensor, str]) -> None:
        self._writes = Writes({name: parameter for parameter, name in names.items()})
        self._written: list[str] = []
        load = engine.load_checkpoint

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            self.note()
            return loaded

        engine.load_checkpoint = load_checkpoint
        read_as_they_are(engine)

    def copy_to_masters(self) -> None:
        """Refuse writes to parameters; see `WrittenValues.copy_to_masters`."""
        self._written += self._writes.since()
        if self._written:
            raise AccumulationError(
                f"{', '.join(self._written[:5])}: written in place since the last step, which DeepSpeed's stage 3 "
                "undoes at the next, whether the loop wrote it, the forward (as embeddings with max_norm do) or a "
                "hook of backward (an optimizer that steps there): ranks hold parts of it and of its fp32 master. "
                "Write inside accelerator.gathered(model, write=True); a saved state goes in with load_state()"
            )

    def note(self) -> None:
        """Record the writes; see `WrittenValues.note`."""
        self._writes.since()
        self._written.clear()


def written_values(engine: Any, names: Mapping[Tensor, str], context: Context) -> WrittenValues:
    """Return the record of writes into an engine's parameters, by the engine's stage."""
    if not engine.zero_optimization():
        return WrittenValues()
    return (
        WrittenOutsideGathered(engine, names)
        if engine.zero_optimization_partition_weights()
        else WrittenToFlat(engine, names, context)
    )


def converted(names: list[str]) -> str:
    """Return the error message for parameters that were converted to another dtype after `prepare`."""
    return (
        f"{list_some(names)}: converted to another dtype after prepare(), by model.to(dtype) or .data, while the "
        "DeepSpeed engine keeps the earlier one: choose mixed_precision, or convert the model before prepare()"
    )
