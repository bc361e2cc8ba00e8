"""The card of an exported model: what it is, how to load it, and how it was trained.

A card is public. It holds numbers, switches and the plan's own facts, but no strings of settings or configurations,
which may be paths, hosts or secrets.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from drivetrain.hub.base_model import BASE, CONFIG, name_on_hub
from drivetrain.hub.run_curves import MetricCurve
from drivetrain.plan.effective_plan import EffectivePlan
from drivetrain_checkpoint import open_export

_FACTS = (
    "processes",
    "device",
    "backend",
    "precision",
    "layers",
    "sequences",
    "fp8 layers",
    "data ",
    "states ",
)
_UNSHOWN_SECTIONS = ("state", "checkpoint", "tracking")  # how a run is kept, not what it computes
_MOST_METRICS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """The facts of an export that its card tells.

    Attributes:
        library: The library that loads it: drivetrain, transformers or peft.
        load: The Python lines that load it; REPO stands for its name on the Hub.
        weights: The number of its values, their dtypes and files.
        base_model: The name on the Hub of the model under adapters; None for none.
    """

    library: str
    load: str
    weights: str
    base_model: str | None = None


def describe_export(folder: Path, base_model: object = None) -> ExportFacts:
    """Read the headers and configurations of an export.

    Args:
        folder: The folder of the export.
        base_model: The name on the Hub of the model under adapters that name a path; None if it is not given.

    Raises:
        NoCheckpointError, CorruptCheckpointError, ValueError: The folder holds no complete export; see `open_export`.
    """
    adapter = next(iter(sorted(folder.rglob(CONFIG))), None)
    places = open_export(folder if adapter is None else adapter.parent).places.values()
    stored = {(place.file, place.name): place.info for place in places}.values()
    num_files = len({place.file for place in places})
    count = "1 file" if num_files == 1 else f"{num_files} files"
    dtypes = ", ".join(sorted({str(info.dtype).removeprefix("torch.") for info in stored}))
    weights = f"{sum(prod(info.shape) for info in stored):,} values of {dtypes} in {count}"
    if adapter is not None:
        on_hub = name_on_hub(json.loads(adapter.read_text()).get(BASE)) or name_on_hub(base_model)
        within = "" if adapter.parent == folder else f', subfolder="{adapter.parent.relative_to(folder)}"'
        load = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{on_hub or "..."}")  # or its own class\n'
            f'model = PeftModel.from_pretrained(base, "REPO"{within})'
        )
        return ExportFacts(library="peft", load=load, weights=weights, base_model=on_hub)
    config = folder / "config.json"
    kinds: Any = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    if kinds and str(kinds[0]).isidentifier():
        load = f'from transformers import {kinds[0]}\n\nmodel = {kinds[0]}.from_pretrained("REPO")'
        return ExportFacts(library="transformers", load=load, weights=weights)
    load = (
        "from drivetrain import Accelerator\n\naccelerator = Accelerator()\n"
        "model = accelerator.prepare(model)  # of the class that was trained\n"
        'accelerator.load_model(model, accelerator.from_hub("REPO"))'
    )
    return ExportFacts(library="drivetrain", load=load, weights=weights)


def model_card(
    repo_id: str,
    *,
    export: ExportFacts,
    plan: EffectivePlan,
    facts: Mapping[str, str],
    config: Mapping[str, float],
    curves: Sequence[MetricCurve],
    picture: str | None,
    card_data: Mapping[str, Any],
) -> str:
    """Return the text of README.md.

    Args:
        repo_id: The name of the repository on the Hub.
        export: The facts of the export.
        plan: The effective plan of the run.
        facts: Facts of the run beside the plan's.
        config: The numbers of the run's configuration.
        curves: The metrics that the run has logged.
        picture: The name of the file with the picture of the losses; None for none.
        card_data: Entries of the front matter, such as `{"license": "mit"}`; they replace the card's own.
    """
    front = {
        "library_name": export.library,
        "tags": ["drivetrain"],
        "base_model": export.base_model,
        **card_data,
    }
    name = repo_id.rpartition("/")[2]
    planned = {key: value for key, value in plan.facts.items() if key.startswith(_FACTS)}
    told = {"weights": export.weights, **facts, **planned}
    settings = {
        row.setting: row.applied
        for row in plan.rows
        if isinstance(row.applied, (bool, int, float))
        and (row.source != "default" or row.applied != row.asked)
        and row.setting.partition(".")[0] not in _UNSHOWN_SECTIONS
    }
    parts = [  # JSON is YAML
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None),
        "---",
        f"# {name}\n\nThis model was trained with drivetrain. Load it:\n",
        f"```python\n{export.load.replace('REPO', repo_id)}\n```\n",
        "## Training\n",
        _table(("fact", "value"), told.items()),
        _table(("setting", "value"), settings.items()),
        _table(("configuration", "value"), config.items()),
    ]
    if curves:
        rows = [
            (one.name, f"{one.last:.6g}", *(_at(point) for point in _extremes(one)))
            for one in curves[:_MOST_METRICS]
        ]
        parts += ["## Metrics\n", _table(("metric", "last", "lowest", "highest"), rows)]
    if len(curves) > _MOST_METRICS:
        parts.append(f"{len(curves) - _MOST_METRICS} more metrics were logged.\n")
    parts += [f"![The losses over the optimizer steps]({picture})\n"] if picture else []
    return "\n".join(part for part in parts if part)


def _extremes(curve: MetricCurve) -> Sequence[tuple[float, float] | None]:
    by_value = sorted(curve.points, key=lambda point: point[1])
    return (by_value[0], by_value[-1]) if by_value else (None, None)


def _at(point: tuple[float, float] | None) -> str:
    return "" if point is None else f"{point[1]:.6g} at step {point[0]:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown; no text without rows."""
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines, ""]) if lines else ""
