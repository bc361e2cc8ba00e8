"""Sharded models that outlast their training: torch cannot undo the sharding.

`close` ends the training of a model and leaves its parameters in shards. A later `prepare` of the same backend finds
the model here, and trains it from its shards.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from torch import nn

from drivetrain_backends.fsdp.guards.forward_writes import ForwardWrites
from drivetrain_backends.fsdp.models.fp8_gather import Fp8Gather
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.fsdp.models.sharded_parameter import ParameterHooks, ProgramUse
from drivetrain_precision.fp8.protocol import gathers_in_fp8


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class RetainedModel:
    """A sharded model, with the objects that live as long as the model."""

    sharded: ShardedModel  # the sharded model with its blocks and parameters
    hooks: ParameterHooks  # the users' hooks on its parameters
    fp8_gather: Fp8Gather  # the weights that are gathered in 8 bits
    use: ProgramUse  # the use of the parameters by a program's own code
    writes: ForwardWrites  # the writes of forwards into gathered parameters


class RetainedModels:
    """The models that a backend has sharded; a model is kept only as long as the program holds it."""

    def __init__(self) -> None:
        # Weak values too, because a RetainedModel holds its module, whose forward hook holds the RetainedModel.
        self._found: WeakKeyDictionary[nn.Module, ref[RetainedModel]] = WeakKeyDictionary()

    def find(self, model: nn.Module) -> RetainedModel | None:
        """Return the retained model of the user's module; None if this backend has not sharded the module."""
        found = self._found.get(model)
        return None if found is None else found()

    def begin_again(self, models: Iterable[nn.Module]) -> None:
        """Release the parameters of retained models that forwards have gathered since `close`."""
        for retained in filter(None, map(self.find, models)):
            retained.sharded.reshard()
            retained.sharded.check(thoroughly=True)

    def add(self, retained: RetainedModel) -> None:
        """Retain a model, unless it has fp8 layers, which `close` converts to plain ones."""
        module = retained.sharded.module
        if not any(map(gathers_in_fp8, module.modules())):
            self._found[module] = ref(retained)
