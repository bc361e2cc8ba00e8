"""The files that Hugging Face Accelerate's `save_state` writes into a folder, recognized by their names.

```text
checkpoint_0/
  model.safetensors              or pytorch_model.bin; the second model's is model_1.safetensors, and so on
  optimizer.bin                  torch's state dict, by parameter index; optimizer_1.bin, ...
  scheduler.bin                  scheduler_1.bin, ...
  scaler.pt                      the loss scale of fp16
  dl_state_dict.bin              of a stateful data loader; dl_state_dict_1.bin, ...
  random_states_0.pkl            one per rank
  custom_checkpoint_0.pkl        one per registered object
```

As written by Accelerate 1.15.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain_checkpoint.errors import CorruptCheckpointError, ForeignStateError
from drivetrain_checkpoint.export.export_plan import INDEX
from drivetrain_checkpoint.format.layout import MANIFEST, step_folders

PICKLED_INDEX = "pytorch_model.bin.index.json"

_NUMBERED = re.compile(
    r"(?P<stem>model|pytorch_model|pytorch_model_fsdp|optimizer|scheduler|dl_state_dict|random_states|custom_checkpoint)"
    r"(?:_(?P<number>\d+))?\.(?P<end>safetensors|bin|pkl)"
)
_KINDS = {
    ("model", "safetensors"): "models",
    ("pytorch_model", "bin"): "models",
    ("pytorch_model_fsdp", "bin"): "models",
    ("optimizer", "bin"): "optimizers",
    ("scheduler", "bin"): "schedulers",
    ("dl_state_dict", "bin"): "loaders",
    ("random_states", "pkl"): "generators",
    ("custom_checkpoint", "pkl"): "custom",
}
_INDICES = (INDEX, PICKLED_INDEX)
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_SCALER = "scaler.pt"
_TELLING = ("optimizers", "schedulers", "generators")  # they identify a state; a model alone is an export
_NAMED_BY_NUMBER = re.compile(r"checkpoint_(\d+)")
_DIVIDED_MODEL = re.compile(r"(pytorch_model(_fsdp)?|optimizer)_\d+")
_ENGINE_FOLDER = re.compile(r"pytorch_model(_\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateFiles:
    """The files of a state by content, in the order in which Accelerate prepared or registered the objects."""

    models: tuple[Path, ...]  # for each one file, or the index of several
    optimizers: tuple[Path, ...]
    schedulers: tuple[Path, ...]
    loaders: tuple[Path, ...]
    generators: Mapping[int, Path]  # by rank; on a disk that is not shared, of this host's ranks only
    custom: tuple[Path, ...]
    scaler: Path | None  # that of the loss
    others: tuple[Path, ...]  # files and folders that are not recognized


def find_accelerate_state(directory: Path) -> Path | None:
    """Find a folder that Accelerate's `save_state` wrote: `directory` itself, or the last numbered one in it.

    Args:
        directory: A folder of `save_state`, or a folder of `checkpoint_0`, `checkpoint_1`, ... that holds no
            drivetrain checkpoints.

    Returns:
        The folder; None if no folder of `save_state` is here.
    """
    if not directory.is_dir() or (directory / MANIFEST).exists() or step_folders(directory):
        return None
    if _is_state(directory):
        return directory
    numbered = {
        int(match[1]): one for one in directory.iterdir() if (match := _NAMED_BY_NUMBER.fullmatch(one.name))
    }
    last = numbered[max(numbered)] if numbered else None
    return last if last is not None and last.is_dir() and _is_state(last) else None


def list_accelerate_state(folder: Path) -> AccelerateFiles:
    """Sort the files of a folder by content.

    Raises:
        ForeignStateError: A model or optimizer is saved in shards, or twice.
        CorruptCheckpointError: A file of a numbered series is missing.
    """
    found: dict[str, dict[int, Path]] = {kind: {} for kind in _KINDS.values()}
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        kind, number = _what(path)
        if kind is None:
            if not _SHARD.fullmatch(path.name) and path.name != _SCALER:
                others.append(path)
        elif number in found[kind]:
            raise ForeignStateError(
                f"{folder} holds {found[kind][number].name} and {path.name}, of which one is an earlier save's: "
                "remove it"
            )
        else:
            found[kind][number] = path
    _check_whole(folder, others)
    scaler = folder / _SCALER
    generators = found.pop("generators")
    rows: dict[str, tuple[Path, ...]] = {}
    for kind, numbered in found.items():
        if lacking := sorted(set(range(max(numbered, default=-1) + 1)) - set(numbered)):
            raise CorruptCheckpointError(
                f"{folder} holds {kind} up to number {max(numbered)}, and number {lacking[0]} is missing: fetch it "
                "again"
            )
        rows[kind] = tuple(numbered[number] for number in sorted(numbered))
    return AccelerateFiles(
        **rows, generators=generators, scaler=scaler if scaler.is_file() else None, others=tuple(others)
    )


def _is_state(folder: Path) -> bool:
    return any(_what(path)[0] in _TELLING for path in folder.iterdir())


def _what(path: Path) -> tuple[str | None, int]:
    """Return the kind of a file and its number in its series; the kind is None for an unknown file name."""
    if path.name in _INDICES:
        return "models", 0
    match = _NUMBERED.fullmatch(path.name)
    if match is None or not path.is_file():
        return None, 0
    return _KINDS.get((match["stem"], match["end"])), int(match["number"] or 0)


def _check_whole(folder: Path, others: Iterable[Path]) -> None:
    """Refuse states that are sharded: each rank wrote only a part."""
    for path in others:
        if not path.is_dir():
            continue
        if _DIVIDED_MODEL.fullmatch(path.name) and any(path.glob("*.distcp")):
            raise ForeignStateError(
                f"{path} is a state in parts, with a pickle of its own that could run code: save once more in "
                "Accelerate with fsdp_state_dict_type: FULL_STATE_DICT; or run `accelerate merge-weights` over the "
                "model's folder and load_model() what it writes, without the optimizer"
            )
        if _ENGINE_FOLDER.fullmatch(path.name):
            raise ForeignStateError(
                f"{path} is a DeepSpeed engine's own checkpoint, whose pickles could run code: run zero_to_fp32.py "
                f"of {folder} with --safe_serialization and load_model() what it writes, without the optimizer"
            )
