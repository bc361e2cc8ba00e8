"""Keep weights as a checkpoint packs them: in fp8, with a scale for each block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drivetrain_dispatch.loading.load_plan import LoadPlan, PlannedTensor
from drivetrain_dispatch.loading.quantize_on_load import Packing, Read
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.loading.tensor_reader import no_room
from drivetrain_dispatch.loading.weight_source import WeightSource
from drivetrain_dispatch.quantization.block_scaled import BlockScaledTensor


def stored_parts(name: str) -> tuple[str, str]:
    """Return the names by which a load reads the values and the scales of an fp8 weight."""
    return f"{name}/0", f"{name}/1"


def without_parts(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint without the parts of fp8 weights."""
    parts = {part for name in stored for part in stored_parts(name)}
    return {name: tensor for name, tensor in stored.items() if name not in parts}


class StoredPacking(Packing):
    """A packing that reads the values and scales of fp8 weights, and makes weights of them.

    Args:
        sources: The source of each tensor, by the checkpoint's names.
    """

    def __init__(self, sources: Mapping[str, WeightSource]) -> None:
        super().__init__(None, None)
        self._sources = sources
        self._stored: Mapping[str, Stored] = {}

    def planned(self, plan: LoadPlan, stored: Mapping[str, Stored]) -> LoadPlan:
        """Return the plan with packed sizes for the weights whose parts can be read.

        Raises:
            ValueError: The checkpoint has no such weights.
        """
        self._stored = stored
        arrivals = [
            replace(
                arrival, packed_bytes=sum(stored[part].size_bytes for part in stored_parts(arrival.stored))
            )
            if arrival.takes_room and stored_parts(arrival.stored)[0] in stored
            else arrival
            for arrival in plan.arrivals
        ]
        if not any(arrival.is_packed for arrival in arrivals):
            raise ValueError(
                "quantization=StoredFP8() keeps fp8 weights with block scales, and the checkpoint has none that the "
                "model can compute with: leave it out"
            )
        return replace(plan, arrivals=tuple(arrivals))

    def check(self, arrivals: Sequence[PlannedTensor]) -> None:
        """Check nothing: weights on the disk are in files, the checkpoint's or one of converted tensors."""

    def pack(
        self,
        arrivals: Sequence[PlannedTensor],
        devices: Mapping[str, torch.device],  # noqa: ARG002 nothing is computed
        read: Read,
        *,
        together: Callable[[Callable[[], nn.Parameter]], nn.Parameter] = lambda step: step(),  # noqa: ARG002
    ) -> None:
        """Read the parts of each weight to its device; those on the disk stay in their file.

        Raises:
            LoadError: A device has no room.
            WeightFilesError: A file is truncated.
        """
        for index, arrival in enumerate(arrivals):
            if not arrival.is_packed:
                continue
            if arrival.place == "disk":
                values, scales = self._mapped(arrival.stored)
            else:
                try:
                    targets = {
                        part: torch.empty(
                            self._stored[part].shape, dtype=self._stored[part].dtype, device=arrival.place
                        )
                        for part in stored_parts(arrival.stored)
                    }
                except (torch.OutOfMemoryError, MemoryError) as error:
                    raise no_room(arrival, arrivals[:index], arrivals) from error
                read(targets)
                values, scales = targets.values()
            weight = BlockScaledTensor(values, scales, arrival.dtype)
            self.weights[arrival.stored] = nn.Parameter(weight, requires_grad=False)

    def _mapped(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the parts of a weight as mapped pages of a file."""
        values, scales = stored_parts(name)
        if (file := self._sources[values].file_of(values)) is not None:
            self.files[name] = file
        return self._sources[values].tensor(values), self._sources[scales].tensor(scales)

    def undo(self) -> None:
        """Drop the weights; the files belong to the checkpoint."""
        self.weights.clear()
