"""Lay out a write plan as files and as the manifest's list of tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivetrain_checkpoint.format.layout import tensor_file
from drivetrain_checkpoint.format.manifest import StoredBox, StoredTensor
from drivetrain_checkpoint.planning.write_plan import TensorName, WritePlan, WrittenBox
from drivetrain_weights.safetensors_layout import FileLayout, TensorEntry, plan_file
from drivetrain_weights.tensor_box import whole


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A tensor file that a rank will write.

    Attributes:
        part: The part of the checkpoint whose tensors it holds.
        rank: The rank that writes it.
        entries: The boxes of tensors that it holds.
        layout: The header, and the offset of each entry.
    """

    part: str
    rank: int
    entries: tuple[WrittenBox, ...]
    layout: FileLayout

    def name(self, attempt: int) -> str:
        """Return the name of the file in the checkpoint's folder."""
        return tensor_file(self.part, self.rank, attempt)


class Catalogue:
    """The files of a plan, computed on demand and cached: the next save has the same.

    Args:
        plan: The plan of which rank writes what.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._files: dict[int, tuple[PlannedFile, ...]] = {}

    def files_of(self, rank: int) -> tuple[PlannedFile, ...]:
        """Return the tensor files of a rank: one for each part of the checkpoint of which it writes any tensor."""
        if rank not in self._files:
            by_part: dict[str, list[WrittenBox]] = {}
            for entry in self._plan.entries[rank]:
                by_part.setdefault(entry.tensor.part, []).append(entry)
            self._files[rank] = tuple(
                PlannedFile(part, rank, tuple(entries), plan_file(_described(self._plan, entries)))
                for part, entries in by_part.items()
            )
        return self._files[rank]

    def tensors(self, parts: Iterable[str], attempt: int) -> Mapping[str, Mapping[str, StoredTensor]]:
        """Return the manifest's list of tensors, by part and name.

        Args:
            parts: The names of all parts of the checkpoint.
            attempt: The attempt number in the names of the files.
        """
        pieces: dict[str, dict[str, list[StoredBox]]] = {part: {} for part in parts}
        for part, name in self._plan.tensors:
            pieces[part][name] = []
        for rank in range(len(self._plan.entries)):
            for file in self.files_of(rank):
                name = file.name(attempt)
                for entry, start in zip(file.entries, file.layout.starts, strict=True):
                    pieces[file.part][entry.tensor.name].append(StoredBox(name, start, entry.box))
        described = self._plan.tensors
        return {
            part: {
                name: StoredTensor(
                    described[TensorName(part, name)].dtype,
                    described[TensorName(part, name)].shape,
                    tuple(sorted(found, key=lambda piece: piece.box)),
                )
                for name, found in tensors.items()
            }
            for part, tensors in pieces.items()
        }


def _described(plan: WritePlan, entries: Iterable[WrittenBox]) -> list[TensorEntry]:
    """Return the entries of a file; the key is the tensor's name, with the box in brackets unless it is the whole."""
    described: list[TensorEntry] = []
    taken = {entry.tensor.name for entry in entries}
    for entry in entries:
        tensor = plan.tensors[entry.tensor]
        key = entry.tensor.name
        if entry.box != whole(tensor.shape):
            key = _free(f"{key}[{', '.join(f'{s.start}:{s.stop}' for s in entry.box.slices())}]", taken)
        described.append(TensorEntry(key, tensor.dtype, entry.box.sizes))
    return described


def _free(key: str, taken: set[str]) -> str:
    """Return the key, lengthened until it is not the name of a tensor."""
    while key in taken:
        key += "'"
    taken.add(key)
    return key
