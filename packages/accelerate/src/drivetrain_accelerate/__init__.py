"""Programs written for Hugging Face Accelerate, run on drivetrain without a changed line.

`install()` puts modules named `accelerate` in front of the import system. Programs and libraries such as transformers
that import `accelerate` then get Accelerate's interface over drivetrain. Importing this package changes nothing.
Functions take the arguments that Accelerate documents; docstrings here describe the differences.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_accelerate.checkpoint_files.run_files import (
        write_accelerate_layout as write_accelerate_layout,
    )
    from drivetrain_accelerate.errors import AlreadyImportedError as AlreadyImportedError
    from drivetrain_accelerate.errors import NotProvidedError as NotProvidedError
    from drivetrain_accelerate.errors import UnknownVersionError as UnknownVersionError
    from drivetrain_accelerate.installation import install as install
    from drivetrain_accelerate.installation import is_installed as is_installed
    from drivetrain_accelerate.installation import uninstall as uninstall

# Module -> its public names.
_NAMES = {
    "checkpoint_files.run_files": "write_accelerate_layout",
    "errors": "AlreadyImportedError NotProvidedError UnknownVersionError",
    "installation": "install is_installed uninstall",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
