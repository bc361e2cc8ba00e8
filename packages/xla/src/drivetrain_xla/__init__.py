"""torch-xla as a backend, on one device or on several by SPMD; it ends with torch-xla, which has no successor of 2.9.

Read in this order: `library` imports torch-xla and makes the mesh; `backend` is the strategy; `sharding` cuts batches
and parameters over devices; `steps` says where graphs end; `compilations` counts what is compiled, and says why;
`layout` reads and loads checkpoints. `static_batches` pads the tail of an epoch. `compat` holds the private names of
torch-xla.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_xla.backend import XLABackend as XLABackend
    from drivetrain_xla.compilations import Compilation as Compilation
    from drivetrain_xla.settings import XLASettings as XLASettings
    from drivetrain_xla.sharding import compilations_of as compilations_of
    from drivetrain_xla.static_batches import PadTail as PadTail
    from drivetrain_xla.static_batches import masked_sum as masked_sum
    from drivetrain_xla.static_batches import pad_rows as pad_rows

# Module -> its public names.
_NAMES = {
    "backend": "XLABackend",
    "compilations": "Compilation",
    "settings": "XLASettings",
    "sharding": "compilations_of",
    "static_batches": "PadTail masked_sum pad_rows",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
