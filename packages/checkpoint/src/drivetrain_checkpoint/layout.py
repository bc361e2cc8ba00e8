"""Where things lie: `DIRECTORY/step-N/`, and the names of the files in it.

```text
checkpoints/
  step-1200/
    weights-model.safetensors   one model's tensors
    weights-model.json          its names, ties and whatever is no tensor
    state.safetensors           what is the same on all ranks: optimizers, schedulers, loaders, custom objects
    state.json
    rank-0.safetensors          what each rank has of its own: random number generators
    rank-0.json
    manifest.json               written last: without it there is no checkpoint
```

A step that is saved again goes beside the committed files (`state.1.json`, ...), and the new manifest replaces the
old one in one rename; then the old files go.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drivetrain_checkpoint.errors import StateError

MANIFEST = "manifest.json"
UNCOMMITTED_MANIFEST = "manifest.json.tmp"

_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PART_FILE = re.compile(r"(weights-[A-Za-z0-9_-]+|state|rank-\d+)(?:\.(?P<attempt>\d+))?\.(json|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The stems of a checkpoint's files: each part is `STEM.json`, with `STEM.safetensors` if it has tensors.

    Attributes:
        models: By the model's name.
        replicated: Of what is the same on all ranks.
        per_rank: By rank.
    """

    models: dict[str, str]
    replicated: str
    per_rank: tuple[str, ...]


def step_folder(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return directory / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says; None if it is not the name of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(directory: Path) -> list[Path]:
    """The folders of `directory` that are named as checkpoints, by step."""
    if not directory.is_dir():
        return []
    folders = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=lambda folder: step_of(folder) or 0)


def plan_parts(model_names: Iterable[str], *, world_size: int, attempt: int) -> Parts:
    """The stems of a checkpoint's parts.

    Args:
        model_names: Of the models.
        world_size: The number of ranks.
        attempt: 0 in a fresh folder; above it where committed files must stay until the new ones are.

    Raises:
        StateError: A model's name cannot be a file's, or two of them differ in case alone.
    """
    suffix = f".{attempt}" if attempt else ""
    models: dict[str, str] = {}
    for name in model_names:
        if not _MODEL_NAME.fullmatch(name):
            raise StateError(f"models[{name!r}]: a model's name may hold letters, digits, _ and -; rename it")
        if name.lower() in (other.lower() for other in models):
            raise StateError(
                f"models[{name!r}]: another name differs from it in case alone; rename one of them"
            )
        models[name] = f"weights-{name}{suffix}"
    return Parts(
        models=models,
        replicated=f"state{suffix}",
        per_rank=tuple(f"rank-{rank}{suffix}" for rank in range(world_size)),
    )


def own_files(folder: Path) -> list[Path]:
    """The files of `folder` that a save wrote, the manifest not among them."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if _PART_FILE.fullmatch(path.name) or path.name == UNCOMMITTED_MANIFEST
    )


def next_attempt(folder: Path) -> int:
    """The first attempt number above that of every file in `folder`; 0 if it holds none."""
    matches = (_PART_FILE.fullmatch(path.name) for path in own_files(folder))
    return max((int(match["attempt"] or 0) + 1 for match in matches if match), default=0)
