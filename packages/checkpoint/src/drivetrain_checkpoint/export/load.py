"""Load an export into a model: match all names first, then load one file at a time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_checkpoint.export.reader import ExportedTensors, open_export
from drivetrain_messages import list_some
from drivetrain_weights import find_ties


class IncompatibleNames(NamedTuple):
    """The names that a load with `strict=False` skipped, in the form that torch's `load_state_dict` returns.

    Attributes:
        missing_keys: The model's names that the export lacks; their tensors keep their values.
        unexpected_keys: The export's names that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportMatch:
    """The mapping from the tensors of a model to those of an export.

    Attributes:
        sources: The export's name for each of the model's names.
        incompatible: The names that only the model or only the export has.
    """

    sources: Mapping[str, str]
    incompatible: IncompatibleNames


def load_model(
    model: nn.Module, folder: Path | str, *, strict: bool = True, device: torch.device | str = "cpu"
) -> IncompatibleNames:
    """Load an export into a model, one file at a time; values are converted to the model's dtypes.

    A tied weight of the model is loaded from any of its names. If the export ties names for which the model has
    separate parameters, each parameter gets the value.

    Args:
        model: The model, not on the meta device and not sharded.
        folder: The folder of the export.
        strict: Whether the names of the model and the export must be the same.
        device: The device onto which the tensors of a file are read before they are copied into the model.

    Returns:
        The names that only the model or only the export has; none if `strict`.

    Raises:
        NoCheckpointError: There is no export in the folder.
        CorruptCheckpointError: A file is missing or damaged; the message names it.
        ValueError: Names or shapes differ from the model's, or the model is on the meta device or sharded. After any
            of these errors, the model is unchanged.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    kind = type(model).__name__
    for name, value in own.items():
        if value.is_meta:
            raise ValueError(
                f"{kind}: {name} is on the meta device, which holds no values; call model.to_empty(device=...) first"
            )
        if hasattr(value, "full_tensor"):
            raise ValueError(
                f"{kind}: {name} is sharded across ranks; use Accelerator.load_model, or load before it is sharded"
            )
    exported = open_export(folder, device=device)
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    match = match_export(exported, shapes, ties=find_ties(own), strict=strict, kind=kind)
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, source in match.sources.items():
        by_file[exported.places[source].file].append(name)
    for names in by_file.values():
        # match_export has checked strictness; with strict=True torch would report the names in other files.
        model.load_state_dict({name: exported[match.sources[name]] for name in names}, strict=False)
    return match.incompatible


def match_export(
    exported: ExportedTensors,
    shapes: Mapping[str, Sequence[int]],
    *,
    ties: Mapping[str, str],
    strict: bool = True,
    kind: str = "model",
) -> ExportMatch:
    """Match the tensors of a model with those of an export.

    Args:
        exported: The export, as `open_export` returns it.
        shapes: The shapes of the model's tensors, by name.
        ties: The model's names that share a tensor with an earlier name: name to first name.
        strict: Whether the names of the model and the export must be the same.
        kind: The name of the model in error messages.

    Raises:
        ValueError: Names or shapes differ, or the export has different values for one tensor of the model.
    """
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        groups[ties.get(name, name)].append(name)
    sources: dict[str, str] = {}
    for group in groups.values():
        there = [name for name in group if name in exported]
        _check_one_value(exported, there, kind)
        sources |= {name: name if name in there else there[0] for name in group if there}
    missing = [name for name in shapes if name not in sources]
    unexpected = [name for name in exported if name not in shapes]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the export is not of this {kind}: missing {list_some(missing) or 'none'}, unexpected "
            f"{list_some(unexpected) or 'none'}; build the "
            "model that was exported, or pass strict=False to load the rest"
        )
    for name, source in sources.items():
        if (found := exported.places[source].info.shape) != tuple(shapes[name]):
            raise ValueError(
                f"{kind}: {name} is of shape {tuple(shapes[name])}, in the export {found}; build the model that was "
                "exported"
            )
    return ExportMatch(sources=sources, incompatible=IncompatibleNames(missing, unexpected))


def _check_one_value(exported: ExportedTensors, names: Sequence[str], kind: str) -> None:
    """Refuse an export with different values for tied names of the model: all values but one would be lost."""
    for other in names[1:]:
        if exported.places[other] == exported.places[names[0]]:
            continue
        one, another = exported[names[0]], exported[other]
        # As bytes, NaNs are equal, and fp8 can be compared.
        if (one.shape, one.dtype) != (another.shape, another.dtype) or not torch.equal(
            one.flatten().view(torch.uint8), another.flatten().view(torch.uint8)
        ):
            raise ValueError(
                f"{kind}: {names[0]} and {other} are one tensor, and the export has two with different values; "
                "untie them in the model, or leave one out of the export"
            )
