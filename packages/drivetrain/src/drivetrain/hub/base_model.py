"""The base model of adapters, told on the Hub by its name there, and not by a path that is here."""

import json
import re
from pathlib import Path

from drivetrain.hub.transfer import Files

CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def name_on_hub(base: object) -> str | None:
    """Return a base model that is a name on the Hub; None for a path or another value."""
    return base if isinstance(base, str) and _NAME.fullmatch(base) and not Path(base).exists() else None


def name_bases(files: Files, base_model: object) -> Files:
    """Return the files of an export, in which adapters name `base_model` where PEFT has written a path.

    Raises:
        ValueError: There is a path, and `base_model` is no name on the Hub.
    """
    named: dict[str, bytes] = {}
    for name, file in files.items():
        if name.rpartition("/")[2] != CONFIG or not isinstance(file, Path):
            continue
        config = json.loads(file.read_text())
        if (base := config.get(BASE)) and name_on_hub(base) is None:
            if name_on_hub(base_model) is None:
                raise ValueError(
                    f"push_to_hub: {name} names the base model by the path {base!r}, which nobody else has; give its "
                    'name on the Hub: card_data={"base_model": "owner/name"}'
                )
            named[name] = json.dumps({**config, BASE: base_model}, indent=2).encode()
    return {**files, **named}
