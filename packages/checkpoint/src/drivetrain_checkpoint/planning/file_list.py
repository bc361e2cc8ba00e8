"""Lay out a write plan as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain_checkpoint.format.division import Division, Divisions, list_in_file_order
from drivetrain_checkpoint.format.layout import tensor_file
from drivetrain_checkpoint.planning.write_plan import TensorName
from drivetrain_weights.safetensors_layout import FileLayout, TensorEntry, plan_file
from drivetrain_weights.tensor_box import Box, whole


class WrittenBox(NamedTuple):
    """A box of a tensor that a rank writes."""

    tensor: TensorName
    box: Box


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The plan of a tensor file that a rank will write: its boxes in file order, its header, the boxes' offsets."""

    part: str
    rank: int
    entries: tuple[WrittenBox, ...]
    layout: FileLayout

    def name(self, attempt: int) -> str:
        """Return the name of the file in the checkpoint's folder."""
        return tensor_file(self.part, self.rank, attempt)


class TensorFiles:
    """The files of a plan, computed on demand and cached, because the next save has the same files."""

    def __init__(self, divisions: Divisions) -> None:
        self.divisions = divisions
        self._files: dict[int, tuple[PlannedFile, ...]] = {}

    def files_of(self, rank: int) -> tuple[PlannedFile, ...]:
        """Return the tensor files of a rank: one file for each part whose tensors the rank writes."""
        if rank not in self._files:
            held = {part: list_in_file_order(tensors, rank) for part, tensors in self.divisions.items()}
            self._files[rank] = tuple(_file(part, rank, tensors) for part, tensors in held.items() if tensors)
        return self._files[rank]


def _file(part: str, rank: int, tensors: Sequence[tuple[str, Division]]) -> PlannedFile:
    """Return a file; a box's key is the tensor's name, with the box in brackets unless it is the whole tensor."""
    taken = {name for name, _ in tensors}
    suffixes = {
        division: [
            ""
            if box == whole(division.shape)
            else f"[{', '.join(f'{s.start}:{s.stop}' for s in box.slices())}]"
            for box in division.boxes[rank]
        ]
        for division in {division for _, division in tensors}
    }
    entries: list[WrittenBox] = []
    described: list[TensorEntry] = []
    for name, division in tensors:
        tensor = TensorName(part, name)
        for box, suffix in zip(division.boxes[rank], suffixes[division], strict=True):
            entries.append(WrittenBox(tensor, box))
            key = name + suffix
            while suffix and key in taken:  # another tensor may have this name
                key += "'"
            taken.add(key)
            described.append(TensorEntry(key, division.dtype, box.sizes))
    return PlannedFile(part, rank, tuple(entries), plan_file(described))
