"""Move from Hugging Face Accelerate to drivetrain: read Accelerate's settings files, flags, names and saved runs.

Installing this package is enough: drivetrain finds its readers by entry points. Programs can call the same functions
to write readers of their own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_migration.counterparts import counterpart as counterpart
    from drivetrain_migration.saved_state import match_model as match_model
    from drivetrain_migration.saved_state import match_optimizer as match_optimizer
    from drivetrain_migration.settings_file import translate_settings as translate_settings

# Module -> its public names.
_NAMES = {
    "counterparts": "counterpart",
    "saved_state": "match_model match_optimizer",
    "settings_file": "translate_settings",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
