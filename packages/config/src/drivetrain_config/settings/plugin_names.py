"""Names of installed plug-ins as values of settings: the list of names, and the check of a value.

A script may register its own plug-ins. A name that no installed package provides is right if the script contains the
name. If the script is not available, the name is wrong if it resembles an installed name.
"""

import re
from collections.abc import Collection

from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.installed import entry_points
from drivetrain_config.settings.schema import FieldSpec
from drivetrain_config.source import Source
from drivetrain_messages import suggest

_RESEMBLANCE = 0.65  # difflib's ratio from which a name counts as misspelt


def plugin_names(group: str, other_words: Collection[str] = ()) -> tuple[str, ...]:
    """Return the values of a field that names plug-ins: `other_words`, then the names of installed plug-ins."""
    return (*other_words, *(point.name for point in entry_points(group)))


def check_plugins(spec: FieldSpec, value: object, source: Source, *, script: str | None = None) -> list[str]:
    """Check the names in a field's value, and return a note for each unknown name that may be right.

    ConfigError for an unknown name that the script does not contain or, without a script, that resembles an installed
    name.
    """
    if spec.plugins is None:
        return []
    known = plugin_names(spec.plugins, spec.other_words)
    if len(known) == len(spec.other_words):
        return []  # nothing is installed in this environment, which says nothing about that of the run
    has_pairs = any(":" in word for word in known)  # `module:Class` stands for every such pair
    names = [
        name for name in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(name, str)
    ]
    unknown = [name for name in names if name not in known and not (has_pairs and ":" in name)]
    notes: list[str] = []
    for name in unknown:
        meant = suggest(name.lower(), known, likeness=_RESEMBLANCE)
        field, listed = f"{spec.section}.{spec.name}={name!r}", ", ".join(known)
        if meant if script is None else not re.search(rf"(?<!\w){word_pattern(name)}(?!\w)", script):
            raise ConfigError(
                f"{field}: no installed package provides it{meant}; say one of {listed}; from {source}. A name that "
                "the script registers itself is accepted by a launch if the script's file contains it"
            )
        notes.append(
            f"{field}: no package provides it in this environment, which has {listed}; it is right if the "
            f"script registers it, or another environment has it; from {source}"
        )
    return notes


def word_pattern(word: str) -> str:
    """Return a pattern that matches a word with underscores or hyphens."""
    return "[-_]".join(map(re.escape, re.split("[-_]", word)))
