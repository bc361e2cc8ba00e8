"""Collect the mismatches between a checkpoint and a model, and report them in one error."""

from collections.abc import Collection, Mapping, Sequence

import torch

from drivetrain_dispatch.errors import WeightsMismatchError
from drivetrain_dispatch.loading.checkpoint_tensors import TensorSpec
from drivetrain_dispatch.model.model_layout import enclosing_modules
from drivetrain_messages import list_some

_NUM_SHOWN = 5  # names of each kind, in an error message


class StateDictDiff:
    """The mismatches between a checkpoint and a model."""

    def __init__(self, *, checkpoint: str, strict: bool) -> None:
        # The tensors that the checkpoint lacks, by the model's names.
        self.missing: dict[str, TensorSpec] = {}
        # The tensors that the model lacks, by the checkpoint's names after renaming.
        self.unexpected: dict[str, TensorSpec] = {}
        self._checkpoint = checkpoint
        self._strict = strict
        self._differing: list[str] = []
        self._empty: list[str] = []  # tensors that would stay on the meta device
        self._valueless = False  # whether checkpoints should have one of these

    def absent(self, name: str, wanted: TensorSpec, *, persistent: bool, empty: bool) -> None:
        """Record a tensor that the checkpoint lacks; `empty` is True if nothing else gives the tensor values."""
        if persistent:
            self.missing[name] = wanted
        self._valueless |= empty and persistent
        if empty and not (persistent and self._strict):
            self._empty.append(f"{name!r} {wanted}")

    def compare(self, name: str, stored: TensorSpec, wanted: TensorSpec, *, converts: bool) -> None:
        """Record a tensor whose shape, or without `converts` whose kind of numbers, differs from the model's."""
        if stored.shape != wanted.shape or (_kind(stored.dtype) != _kind(wanted.dtype) and not converts):
            self._differing.append(f"{name!r} is {stored}, in the model {wanted}")

    def compare_copies(self, names: Sequence[str], stored: TensorSpec, copy: TensorSpec) -> None:
        """Record a tensor of the model that the checkpoint has twice, in different dtypes."""
        if stored.dtype != copy.dtype:
            self._differing.append(
                f"{', '.join(map(repr, names))} are one tensor, but are {stored} and {copy}"
            )

    def check(self, *, known: Collection[str], found: Collection[str]) -> None:
        """Report all mismatches in one error."""
        parts: list[str] = []
        if self._strict and self.missing:
            parts.append(f"{len(self.missing)} missing: {_list_specs(self.missing)}")
        if self._strict and self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {_list_specs(self.unexpected)}")
        if self._differing:
            parts.append(f"{len(self._differing)} that differ: {_show(self._differing)}")
        if self._empty:
            parts.append(
                f"{len(self._empty)} on the meta device that would get no values: {_show(self._empty)}; give them "
                "values first (init_empty_weights leaves buffers theirs)"
            )
        if not parts:
            return
        if hint := _prefix_hint(known, found):
            parts.append(hint)
        elif self._strict and self._valueless:
            parts.append(
                "what is missing has no values to keep: load a checkpoint that has it, or the model without that "
                "part, and build it afterwards"
            )
        elif self._strict and (self.missing or self.unexpected):
            parts.append("strict=False leaves what is missing as it is and what is unexpected out")
        text = "\n  ".join(parts)
        raise WeightsMismatchError(
            f"{self._checkpoint} does not fit the model, which is as it was:\n  {text}"
        )


def _list_specs(tensors: Mapping[str, TensorSpec]) -> str:
    return _show([f"{name!r} {stored}" for name, stored in tensors.items()])


def _show(texts: Sequence[str]) -> str:
    return list_some(texts, most=_NUM_SHOWN)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "whole"


def _prefix_hint(known: Collection[str], found: Collection[str]) -> str:
    """Return a hint if all names would fit with a prefix added or removed; empty otherwise."""
    known, found = set(known), set(found)
    if not known or not found or found <= known or known <= found:
        return ""
    name = min(found - known)
    added = sorted(own[: -len(name)] for own in known if own.endswith(f".{name}"))
    removed = sorted(
        (
            f"{outer}."
            for file in {min(found - known), max(found - known)}
            for outer in enclosing_modules(file)
            if outer
        ),
        key=len,
    )
    for prefix in added:
        if fit := _fit({prefix + file for file in found}, known):
            return f"{fit[0]} with {prefix!r} before them: give rename=lambda name: {prefix!r} + name{fit[1]}"
    for prefix in removed:
        if fit := _fit({file.removeprefix(prefix) for file in found}, known):
            return (
                f"{fit[0]} without {prefix!r}: give rename=lambda name: name.removeprefix({prefix!r}){fit[1]}"
            )
    return ""


def _fit(found: set[str], known: set[str]) -> tuple[str, str] | None:
    """Return how names fit, and a remedy for other names; None unless all names of one side fit."""
    if found == known:
        return "all names fit", ""
    if found < known:
        return "all names of the checkpoint fit", ", and strict=False for the others of the model"
    if known < found:
        return "all names of the model are there", ", and strict=False for the others of the checkpoint"
    return None
