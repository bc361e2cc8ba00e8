"""Megatron-Core's parallel layers as a backend: models made of them, trained by a plain loop.

Read in this order: `library` imports Megatron; `groups` makes its parallel state of our mesh; `divisions` finds what
each rank holds of a model; `backend` trains replicas of such parts. `conversion` makes Megatron's models of those of
transformers: of the shape in `shapes`, with the weights by the tables of `weights`, out of the blocks of `layers`.
`checkpoints` reads weights that Megatron has saved.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_megatron.backend import MegatronBackend as MegatronBackend
    from drivetrain_megatron.checkpoints import read_megatron_checkpoint as read_megatron_checkpoint
    from drivetrain_megatron.conversion import megatron_from_transformers as megatron_from_transformers
    from drivetrain_megatron.conversion import transformers_from_megatron as transformers_from_megatron
    from drivetrain_megatron.settings import MegatronSettings as MegatronSettings

# Module -> its public names.
_NAMES = {
    "backend": "MegatronBackend",
    "checkpoints": "read_megatron_checkpoint",
    "conversion": "megatron_from_transformers transformers_from_megatron",
    "settings": "MegatronSettings",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
