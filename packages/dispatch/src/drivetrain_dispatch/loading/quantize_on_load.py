"""Pack weights while a checkpoint is read, one at a time, so that only one is held in full."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.loading.load_plan import LoadPlan, PlannedTensor
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.loading.tensor_reader import no_room
from drivetrain_dispatch.model.tensor_subclass import parts_of, put_parts
from drivetrain_dispatch.offload.offload_file import parts_in_file, write_offloaded
from drivetrain_dispatch.quantization.protocol import Quantization
from drivetrain_weights import MappedFile

# A function that reads the values of tensors, which it gets by the checkpoint's names.
Read = Callable[[Mapping[str, Tensor]], None]


class Packing:
    """The packing of the weights that a load reads.

    Args:
        quantization: How weights are packed; None if none is.
        folder: The folder for packed weights that stay on the disk.

    Attributes:
        quantization: How weights are packed; None if none is.
        weights: The packed weights, by the checkpoint's names.
        files: The files of packed weights that stay on the disk, by the same names.
    """

    def __init__(self, quantization: Quantization | None, folder: Path | str | None) -> None:
        self.quantization = quantization
        self.weights: dict[str, nn.Parameter] = {}
        self.files: dict[str, MappedFile] = {}
        self._folder = folder

    def planned(self, plan: LoadPlan, stored: Mapping[str, Stored]) -> LoadPlan:  # noqa: ARG002 an override uses it
        """Return the plan with the sizes of packed weights; here the plan has them already."""
        return plan

    def check(self, arrivals: Sequence[PlannedTensor]) -> None:
        """Check that there is a folder for packed weights that stay on the disk.

        Raises:
            ValueError: The folder is missing.
        """
        on_disk = [arrival.names[0] for arrival in arrivals if arrival.is_packed and arrival.place == "disk"]
        if on_disk and self._folder is None:
            raise ValueError(
                f"device_map puts {on_disk[0]!r} on the disk, and packed it is in no file yet: name a folder for it "
                f"and {len(on_disk) - 1} more, offload_folder=..."
            )

    def pack(
        self,
        arrivals: Sequence[PlannedTensor],
        devices: Mapping[str, torch.device],
        read: Read,
        *,
        together: Callable[[Callable[[], nn.Parameter]], nn.Parameter] = lambda step: step(),
    ) -> None:
        """Read and pack weights, one after the other.

        Args:
            arrivals: The tensors of the load, some of which are packed.
            devices: The device that computes with each tensor and packs it, by the model's names.
            read: A function that reads a weight into its unpacked memory.
            together: A function that runs a step on all ranks, and raises on every rank if it fails on one.

        Raises:
            LoadError: A device has no room.
            WeightFilesError: The disk has no room.
            ValueError: A weight cannot be packed.
        """
        if self.quantization is None:
            return
        for index, arrival in enumerate(arrivals):
            if not arrival.is_packed:
                continue
            device = devices[arrival.names[0]]
            try:
                full = torch.empty(arrival.shape, dtype=arrival.dtype, device=device)
                read({arrival.stored: full})
                step = partial(self._packed, self.quantization, arrival, full)
                self.weights[arrival.stored] = together(step)
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise no_room(arrival, arrivals[:index], arrivals) from error

    def undo(self) -> None:
        """Drop the weights, and delete their files."""
        self.weights.clear()
        for file in self.files.values():
            file.path.unlink(missing_ok=True)

    def _packed(self, quantization: Quantization, arrival: PlannedTensor, full: Tensor) -> nn.Parameter:
        weight = quantization.pack(full)
        if arrival.place == "disk" and self._folder is not None:
            parts = parts_in_file(arrival.names[0], weight)
            file = self.files[arrival.stored] = write_offloaded(parts, self._folder)
            put_parts(weight, [file.tensor(key) for key in parts])
        elif arrival.place != full.device:
            put_parts(weight, [part.to(arrival.place) for part in parts_of(weight)])
        return weight


class SavesNothing:
    """A replacement for `save_pretrained` of a model whose weights are packed."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to save: the library would write packed weights that nothing reads, maybe over the full ones."""
        raise OffloadedError(
            "the weights of this model are packed, and save_pretrained would write what no library reads: load "
            "the model without quantization to save it, or save model.state_dict() by torch.save"
        )


def refuse_to_save(model: nn.Module) -> None:
    """Make `save_pretrained` of a model with packed weights raise, if it has such a method."""
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = SavesNothing()
