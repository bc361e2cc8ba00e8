"""A checkpoint's values into a model: planned and checked first, then read, and only then is the model touched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_dispatch.device_map import Device, check_places, places_of_tensors
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.filling import Progress, allocate, check_copies, fill
from drivetrain_dispatch.load_plan import Arrival, LoadPlan, plan_load, present_places
from drivetrain_dispatch.misfits import Stored
from drivetrain_dispatch.relay import Relay
from drivetrain_dispatch.sizes import named_tensors
from drivetrain_dispatch.weight_files import MappedFile, open_weights

ReadBy = Literal["each", "rank 0"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        missing: Names of the model that the checkpoint lacks, which stayed as they were; none where it was strict.
        unexpected: Names of the checkpoint that the model lacks; none where it was strict.
        mapped: The file of each tensor that stayed on disk, by every name that the model has for it.
        converted_at_use: Of these, what those are to be whose file has another dtype: they are as the file has them.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mapped: Mapping[str, MappedFile]
    converted_at_use: Mapping[str, torch.dtype]


class _Change(NamedTuple):
    """A tensor of the model and its value: given to `kept`, or put in its place under all names."""

    names: tuple[str, ...]
    kept: Tensor | None
    value: Tensor


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path | str,
    device_map: Mapping[str, Device] | None = None,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
    read_by: ReadBy = "each",
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load weights into a model, each tensor straight to its device and dtype.

    Names, shapes and dtypes are checked before anything is read, and the model is touched when all is there: after
    an error it is as it was. The host's memory holds what is placed on it and 8 MiB a thread. Tensors on `"disk"`
    become the file's pages, without a copy. Tied parameters stay tied; the checkpoint may have one of their names, or
    all with equal values. Parameters that have memory stay the same objects, so that optimizers keep them; for a
    moment there is room for both values. Buffers that are not persistent stay as they are.

    Args:
        model: The model, usually on the meta device; changed in place.
        checkpoint: A safetensors file, an index of several, or a folder that holds one of them; or the same of
            torch's own format (`.bin`, `.pt`, `.pth`), of which only tensors are read and no code runs.
        device_map: Device by the name of a module, parameter or buffer; `"disk"` leaves values in the file. None
            keeps each tensor where it is, and puts those of the meta device on the CPU. A tied tensor goes to the
            first device that one of its names has, rather than to the disk.
        dtype: What floating-point and complex tensors become; None takes the model's dtypes.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        strict: Whether the checkpoint must have the model's names and no others.
        rename: From a name of the checkpoint to the model's; None leaves a tensor out.
        num_threads: That read at the same time; None takes as many as there are processors, four at most.
        progress: Called with the bytes that were read and all that are.
        read_by: `"each"` rank reads for itself; or `"rank 0"` reads and hands what it reads to the ranks of
            `process_group`, which all call this: only what they leave on disk must be there for them too.
        process_group: The ranks that "rank 0" reads for; None is all.

    Raises:
        WeightFilesError: A file is missing, damaged, or changed while it was read.
        WeightsMismatchError: Names or shapes do not fit, or a tensor would stay on the meta device. Names all.
        TiedParametersError: The checkpoint has different values for one parameter.
        DeviceMapError: The map does not fit the model or the machine.
        LoadError: A device has no room, or another rank failed.
        ValueError: Another argument is wrong.
    """
    _check_arguments(read_by, num_threads)
    relay = Relay(process_group) if read_by == "rank 0" else None
    together = _alone if relay is None else relay.together
    files: dict[str, MappedFile] = {}

    def catalogue() -> dict[str, Stored]:
        files.update(open_weights(checkpoint))
        return {name: _stored(file, name) for name, file in files.items()}

    stored = catalogue() if relay is None else relay.from_reader(catalogue)
    targets: dict[str, Tensor] = {}

    def prepare() -> LoadPlan:
        _check_whole(model)
        places = present_places(model) if device_map is None else places_of_tensors(model, device_map)
        check_places(places.values())
        plan = plan_load(
            model, stored, places, checkpoint=str(checkpoint), dtype=dtype, special_dtypes=special_dtypes,
            strict=strict, rename=rename,
        )  # fmt: skip
        if not files and any(arrival.place == "disk" for arrival in plan.arrivals):
            files.update(_opened_again(checkpoint, stored))
        if files:
            check_copies(plan.arrivals, files)
        allocate(plan.arrivals, targets)
        return plan

    try:
        plan = together(prepare)
        if relay is None:
            fill(stored, targets, files, num_threads=num_threads, progress=progress)
        else:
            relay.fill(stored, targets, files, progress=progress)
        changes = together(lambda: _changes(model, plan, targets, files))
    except BaseException:
        targets.clear()  # an error that is kept holds no memory
        raise
    _put(model, changes)
    return _report(plan, files)


def _check_arguments(read_by: str, num_threads: int | None) -> None:
    if read_by not in get_args(ReadBy):
        raise ValueError(f"read_by={read_by!r}: must be one of {', '.join(map(repr, get_args(ReadBy)))}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: must be at least 1")


def _check_whole(model: nn.Module) -> None:
    """Check that no parameter is a rank's part of one.

    Raises:
        ValueError: One is.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name!r} is divided among ranks, which this does not load into: load the model before it is divided"
            )


def _alone(step: Callable[[], Result]) -> Result:
    return step()


def _stored(file: MappedFile, name: str) -> Stored:
    tensor = file.tensor(name)
    return Stored(tuple(tensor.shape), tensor.dtype, file.divisible(name))


def _opened_again(checkpoint: Path | str, stored: Mapping[str, Stored]) -> dict[str, MappedFile]:
    """The files, on a rank for which rank 0 read what they hold."""
    files = open_weights(checkpoint)
    if {name: _stored(file, name) for name, file in files.items()} != dict(stored):
        raise WeightFilesError(f"{checkpoint} is not on this rank what it is on rank 0: copy it here again")
    return files


def _changes(
    model: nn.Module, plan: LoadPlan, targets: Mapping[str, Tensor], files: Mapping[str, MappedFile]
) -> list[_Change]:
    """What is to be done to the model, made ready: nothing that is left to do can fail."""
    for file in {file.path: file for file in files.values()}.values():
        file.check_unchanged()
    by_name = dict(named_tensors(model))
    changes: list[_Change] = []
    for arrival in plan.arrivals:
        if arrival.is_read:
            value = targets[arrival.stored]
        elif arrival.place == "disk":
            value = files[arrival.stored].tensor(arrival.stored)
        else:
            value = torch.empty(arrival.shape, dtype=arrival.dtype, device="meta")
        changes.append(_change(arrival, by_name[arrival.names[0]], value))
    return changes


def _change(arrival: Arrival, old: Tensor, value: Tensor) -> _Change:
    """A buffer is replaced, and so is a parameter that can hold no such value; any other only gets it."""
    if not isinstance(old, nn.Parameter):
        return _Change(arrival.names, None, value)
    learns = old.requires_grad and (value.is_floating_point() or value.is_complex())
    if learns == old.requires_grad and _takes(old, value):
        return _Change(arrival.names, old, value)
    new = type(old)(value, requires_grad=learns)  # a subclass takes what its base takes
    vars(new).update(vars(old))
    return _Change(arrival.names, None, new)


def _takes(old: Tensor, value: Tensor) -> bool:
    """Whether a tensor can be given a value of another device and dtype: not where torch has it in another way."""
    if old.is_meta or value.is_meta:
        return old.is_meta and value.is_meta
    probe = torch.empty(0, dtype=old.dtype, device=old.device)
    try:
        probe.data = torch.empty(0, dtype=value.dtype, device=value.device)
    except RuntimeError:
        return False
    return True


def _put(model: nn.Module, changes: list[_Change]) -> None:
    for names, kept, value in changes:
        if kept is not None:
            kept.data = value
            continue
        for name in names:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, value)


def _report(plan: LoadPlan, files: Mapping[str, MappedFile]) -> LoadReport:
    on_disk = [arrival for arrival in plan.arrivals if arrival.place == "disk"]
    return LoadReport(
        missing=plan.missing,
        unexpected=plan.unexpected,
        mapped={name: files[arrival.stored] for arrival in on_disk for name in arrival.names},
        converted_at_use={
            name: arrival.dtype
            for arrival in on_disk
            if arrival.dtype != arrival.stored_dtype
            for name in arrival.names
        },
    )
