"""The names of a checkpoint's folder, `DIRECTORY/step-N/`, and of the files in it.

```text
checkpoints/
  step-1200/
    weights-model.json             one model's names, ties and values other than tensors
    weights-model.r0.safetensors   the part of its tensors that rank 0 wrote; rank 1's is .r1, and so on
    state.json                     replicated states: optimizers, schedulers, loaders, custom objects
    state.r0.safetensors
    rank-0.json                    per-rank states: random number generators
    rank-0.r0.safetensors
    manifest.json                  written last: without it there is no checkpoint
```

A step that is saved again is written beside the committed files (`state.1.json`, ...). The new manifest replaces the
old one atomically; then the old files are deleted.
"""

import re
from collections.abc import Iterable

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.storage.place import Place, storage_of

MANIFEST = "manifest.json"
UNCOMMITTED_MANIFEST = "manifest.json.tmp"

_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PART_FILE = re.compile(
    r"(weights-[A-Za-z0-9_-]+|state|rank-\d+)(?:\.r(?P<rank>\d+))?(?:\.(?P<attempt>\d+))?\.(json|safetensors)"
)
STATE_PART = "state"


def step_folder(directory: Place, step: int) -> Place:
    """Return the folder of the checkpoint of `step`."""
    return directory / f"step-{step}"


def step_of(folder: Place) -> int | None:
    """Return the step in a folder's name; None if the name is not that of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(directory: Place) -> list[Place]:
    """Return the folders in `directory` with the name of a checkpoint, sorted by step."""
    steps = (step_of(directory / name) for name in storage_of(directory).folders_in(directory))
    return [step_folder(directory, step) for step in sorted(step for step in steps if step is not None)]


def model_part(name: str) -> str:
    """Return the name of the part of a checkpoint that holds a model."""
    return f"weights-{name}"


def rank_part(rank: int) -> str:
    """Return the name of the part of a checkpoint that holds a rank's own states."""
    return f"rank-{rank}"


def path_in_state(part: str, name: str) -> str | None:
    """Return a tensor's path in the caller's states, such as `"models/model/fc.weight"`; None if it is per-rank."""
    if part == STATE_PART:
        return f"replicated/{name}"
    model = part.removeprefix(model_part(""))
    return f"models/{model}/{name}" if model != part else None


def check_model_names(names: Iterable[str]) -> None:
    """Raise `StateError` unless the names of models can be file names and differ in more than case."""
    met: set[str] = set()
    for name in names:
        if not _MODEL_NAME.fullmatch(name):
            raise StateError(f"models[{name!r}]: a model's name may hold letters, digits, _ and -; rename it")
        if name.lower() in met:
            raise StateError(
                f"models[{name!r}]: another name differs from it in case alone; rename one of them"
            )
        met.add(name.lower())


def tree_file(part: str, attempt: int) -> str:
    """Return the name of the file that holds the names and plain values of a part.

    The attempt is 0 in a new folder. It is higher in a folder whose committed files must stay until the next commit.
    """
    return f"{part}{_suffix(attempt)}.json"


def tensor_file(part: str, rank: int, attempt: int) -> str:
    """Return the name of the file with the tensors that a rank wrote of a part."""
    return f"{part}.r{rank}{_suffix(attempt)}.safetensors"


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a tensor file; None for the name of any other file."""
    match = _PART_FILE.fullmatch(name)
    return int(match["rank"]) if match and match["rank"] else None


def _suffix(attempt: int) -> str:
    return f".{attempt}" if attempt else ""


def has_manifest(folder: Place) -> bool:
    """Return whether a folder has a manifest, valid or not; without one, its save was not completed."""
    return MANIFEST in storage_of(folder).sizes_in(folder)


def own_files(folder: Place) -> list[Place]:
    """Return the files in `folder` that saves wrote, except for the manifest."""
    return [
        folder / name
        for name in sorted(storage_of(folder).sizes_in(folder))
        if _PART_FILE.fullmatch(name) or name == UNCOMMITTED_MANIFEST
    ]


def next_attempt(folder: Place) -> int:
    """Return the number after the highest attempt among the files in `folder`; 0 for a folder without files."""
    matches = (_PART_FILE.fullmatch(path.name) for path in own_files(folder))
    return max((int(match["attempt"] or 0) + 1 for match in matches if match), default=0)
