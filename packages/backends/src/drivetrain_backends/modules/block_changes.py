"""The changes that a run asks for in every model, before its backend prepares it: recomputed and compiled blocks."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain_backends.compat import compilations
from drivetrain_backends.modules.activation_checkpointing import (
    Checkpointing,
    checkpoint_activations,
    checkpointing_of,
    restore_activations,
)
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.settings import ModelSettings

logger = logging.getLogger(__name__)
MOST_TOLD = 64  # compilations that torch remembers


class BlockChanges:
    """The changes of `ModelSettings`, made in place and undone at the end; the same for every backend.

    Hooks of a backend, such as those that gather parameters, run around what is recomputed or compiled.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._undo = ExitStack()
        self._begun = time.time()
        self._known, self._blocks = (
            list[nn.Module](),
            list[nn.Module](),
        )  # models that were changed, and their blocks

    def apply(self, models: Sequence[nn.Module]) -> None:
        """Change models that were not changed before.

        Raises:
            ValueError: No module is of a class that `blocks` names, or one recomputes its activations already.
        """
        settings = self._settings
        if settings.activation_checkpointing == settings.compile == "none":
            return
        # It imports FSDP, which takes as long as torch.
        from drivetrain_backends.modules.wrap_policy import plan_blocks

        for model in models:
            inner = unwrap_compiled(model)
            if any(inner is one for one in self._known):
                continue
            plan = plan_blocks(inner, settings.blocks, asked="model.blocks", others=models)
            blocks = [inner.get_submodule(name) for name in plan.blocks]
            if not blocks and settings.blocks is None:
                blocks = [inner]
                self._tell_whole(inner)
            self._checkpoint(blocks, settings.activation_checkpointing)
            for module in {"none": [], "blocks": blocks, "whole": [inner]}[settings.compile]:
                self._compile(module)
            self._known.append(inner)
            self._blocks += blocks

    def applied(self) -> dict[str, object]:
        """Return the kind of activation checkpointing in force, read back from a changed block; empty without one."""
        if self._settings.activation_checkpointing == "none" or not self._blocks:
            return {}
        return {"activation_checkpointing": checkpointing_of(self._blocks[-1])}

    def undo(self) -> None:
        """Give models their forwards back."""
        self._undo.close()
        self._known.clear()
        self._blocks.clear()

    def compiled(self) -> str | None:
        """Return in words what this process has compiled, in which time, and why again; None if nothing."""
        if self._settings.compile == "none" or not (found := compilations(self._begun)):
            return None
        again = [reason for _, reason in found if reason]
        number = f"{len(found)} graph{'s' * (len(found) > 1)}{' or more' * (len(found) >= MOST_TOLD)}"
        said = f"{number} in {sum(seconds for seconds, _ in found):.3g} s"
        return said if not again else f"{said}; {len(again)} of them again, the last since {again[-1]}"

    def _tell_whole(self, model: nn.Module) -> None:
        if self._settings.activation_checkpointing != "none":
            logger.warning(
                "model.activation_checkpointing: %s names no blocks and has no lists, so that all of it is computed "
                "again at once, which saves little: name classes or patterns in model.blocks",
                type(model).__name__,
            )

    def _checkpoint(self, blocks: Sequence[nn.Module], kind: Checkpointing) -> None:
        # The others are of a model that stayed sharded, whose class keeps what it was made of.
        changed = [block for block in blocks if checkpointing_of(block) != kind]
        checkpoint_activations(changed, kind)
        for block in changed:
            self._undo.callback(_restore, block, type(block))

    def _compile(self, module: Any) -> None:
        before = module.__dict__.get("forward")
        module.forward = torch.compile(module.forward, backend=self._settings.compile_backend)
        restore = (
            partial(setattr, module, "forward", before) if before else partial(delattr, module, "forward")
        )
        self._undo.callback(restore)


def _restore(block: nn.Module, made: type[nn.Module]) -> None:
    """Undo the checkpointing of a block, unless its class has changed since."""
    if type(block) is made:
        restore_activations(block)
