"""Where things lie: `DIRECTORY/step-N/`, and the names of the files in it.

```text
checkpoints/
  step-1200/
    weights-model.json             one model's names, ties and whatever is no tensor
    weights-model.r0.safetensors   the part of its tensors that rank 0 wrote; another rank's is .r1, and so on
    state.json                     what is the same on all ranks: optimizers, schedulers, loaders, custom objects
    state.r0.safetensors
    rank-0.json                    what a rank has of its own: random number generators
    rank-0.r0.safetensors
    manifest.json                  written last: without it there is no checkpoint
```

A step that is saved again goes beside the committed files (`state.1.json`, ...), and the new manifest replaces the
old one in one piece; then the old files go.
"""

import re
from collections.abc import Iterable

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place

MANIFEST = "manifest.json"
UNCOMMITTED_MANIFEST = "manifest.json.tmp"

_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PART_FILE = re.compile(
    r"(weights-[A-Za-z0-9_-]+|state|rank-\d+)(\.r\d+)?(?:\.(?P<attempt>\d+))?\.(json|safetensors)"
)
STATE_PART = "state"


def step_folder(directory: Place, step: int) -> Place:
    """The folder of the checkpoint of `step`."""
    return directory / f"step-{step}"


def step_of(folder: Place) -> int | None:
    """The step that a folder's name says; None if it is not the name of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(directory: Place) -> list[Place]:
    """The folders of `directory` that are named as checkpoints, by step."""
    steps = (step_of(directory / name) for name in storage.folders_in(directory))
    return [step_folder(directory, step) for step in sorted(step for step in steps if step is not None)]


def model_part(name: str) -> str:
    """The part of the checkpoint that holds a model."""
    return f"weights-{name}"


def rank_part(rank: int) -> str:
    """The part of the checkpoint that holds what a rank has of its own."""
    return f"rank-{rank}"


def path_in_state(part: str, name: str) -> str | None:
    """Return how a caller names a tensor, such as `"models/model/fc.weight"`; None for what a rank has of its own.

    Args:
        part: The part of the checkpoint that holds it.
        name: Its name in there.
    """
    if part == STATE_PART:
        return f"replicated/{name}"
    model = part.removeprefix(model_part(""))
    return f"models/{model}/{name}" if model != part else None


def check_model_names(names: Iterable[str]) -> None:
    """Check that models' names can be files'.

    Raises:
        StateError: One cannot, or two of them differ in case alone.
    """
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
    """The file of a part's names and plain values.

    Args:
        part: The part.
        attempt: 0 in a fresh folder; above it where committed files must stay until the new ones are.
    """
    return f"{part}{_suffix(attempt)}.json"


def tensor_file(part: str, rank: int, attempt: int) -> str:
    """The file of those tensors of a part that a rank wrote."""
    return f"{part}.r{rank}{_suffix(attempt)}.safetensors"


def _suffix(attempt: int) -> str:
    return f".{attempt}" if attempt else ""


def own_files(folder: Place) -> list[Place]:
    """The files of `folder` that a save wrote, the manifest not among them."""
    return [
        folder / name
        for name in sorted(storage.sizes_in(folder))
        if _PART_FILE.fullmatch(name) or name == UNCOMMITTED_MANIFEST
    ]


def next_attempt(folder: Place) -> int:
    """The first attempt number above that of every file in `folder`; 0 if it holds none."""
    matches = (_PART_FILE.fullmatch(path.name) for path in own_files(folder))
    return max((int(match["attempt"] or 0) + 1 for match in matches if match), default=0)
