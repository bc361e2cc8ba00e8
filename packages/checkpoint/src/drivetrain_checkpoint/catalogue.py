"""Which file of a checkpoint holds what: a plan of writing, as files and as the manifest's list of tensors. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivetrain_checkpoint.boxes import whole
from drivetrain_checkpoint.layout import tensor_file
from drivetrain_checkpoint.manifest import Piece, StoredTensor
from drivetrain_checkpoint.tensor_file import Entry as FileEntry
from drivetrain_checkpoint.tensor_file import FileLayout, plan_file
from drivetrain_checkpoint.write_plan import Entry, WritePlan


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A tensor file that a rank is to write.

    Attributes:
        name: In the checkpoint's folder.
        part: The part of the checkpoint whose tensors it holds.
        entries: What it holds.
        layout: Where each of them lies.
    """

    name: str
    part: str
    entries: tuple[Entry, ...]
    layout: FileLayout


def files_of(plan: WritePlan, rank: int, attempt: int) -> tuple[PlannedFile, ...]:
    """The tensor files that a rank writes: one for each part of the checkpoint of which it writes something."""
    by_part: dict[str, list[Entry]] = {}
    for entry in plan.entries[rank]:
        by_part.setdefault(entry.tensor.part, []).append(entry)
    return tuple(
        PlannedFile(
            name=tensor_file(part, rank, attempt),
            part=part,
            entries=tuple(entries),
            layout=plan_file(_described(plan, entries)),
        )
        for part, entries in by_part.items()
    )


def tensors_of(
    plan: WritePlan, files: Iterable[PlannedFile], parts: Iterable[str]
) -> Mapping[str, Mapping[str, StoredTensor]]:
    """The manifest's list of tensors, by part and name, from the files of all ranks."""
    pieces: dict[str, dict[str, list[Piece]]] = {part: {} for part in parts}
    for name in plan.tensors:
        pieces[name.part][name.name] = []
    for file in files:
        for entry, start in zip(file.entries, file.layout.starts, strict=True):
            pieces[file.part][entry.tensor.name].append(Piece(file.name, start, entry.box))
    described = {(name.part, name.name): tensor for name, tensor in plan.tensors.items()}
    return {
        part: {
            name: StoredTensor(
                described[part, name].dtype,
                described[part, name].shape,
                tuple(sorted(found, key=lambda piece: piece.box)),
            )
            for name, found in tensors.items()
        }
        for part, tensors in pieces.items()
    }


def _described(plan: WritePlan, entries: Iterable[Entry]) -> list[FileEntry]:
    """A piece's key is the tensor's name, with the box in brackets where it is not the whole."""
    described: list[FileEntry] = []
    taken = {entry.tensor.name for entry in entries}
    for entry in entries:
        tensor = plan.tensors[entry.tensor]
        key = entry.tensor.name
        if entry.box != whole(tensor.shape):
            key = _free(f"{key}[{', '.join(f'{s.start}:{s.stop}' for s in entry.box.slices())}]", taken)
        described.append(FileEntry(key, tensor.dtype, entry.box.sizes))
    return described


def _free(key: str, taken: set[str]) -> str:
    """The key, lengthened where a tensor has it as its name."""
    while key in taken:
        key += "'"
    taken.add(key)
    return key
