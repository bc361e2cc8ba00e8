"""The models that an Accelerator has forgotten, as far as the program still holds them in their prepared form.

A Trainer that trains twice frees its Accelerator's memory in between, keeps the wrapper of its model, and prepares
its optimizer alone.
"""

import gc
from collections.abc import Iterable, Sequence
from weakref import ref

from torch import nn
from torch.optim import Optimizer


class ReleasedModels:
    """Prepared models that `free_memory` forgot, in the order of their preparation."""

    def __init__(self) -> None:
        self._models: list[ref[nn.Module]] = []

    def keep(self, models: Iterable[nn.Module]) -> None:
        """Remember models for as long as the program holds them."""
        self._models = [each for each in self._models if each() is not None] + [ref(each) for each in models]

    def __contains__(self, model: object) -> bool:
        """Return whether a model is one of them, in its prepared form."""
        return any(each() is model for each in self._models)

    def drop(self, models: Sequence[nn.Module]) -> None:
        """Forget models that are prepared again, in the form that they had or as the user built them."""
        parameters = {id(each) for model in models for each in model.parameters()}
        self._models = [each for each in self._models if not _holds(each(), parameters)]

    def trained_by(self, optimizers: Sequence[Optimizer]) -> list[nn.Module]:
        """Return those whose parameters optimizers hold."""
        if not self._models or not optimizers:
            return []
        gc.collect()  # ranks are to agree: what the program let go of is not to be found on one of them
        trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        return [model for each in self._models if (model := each()) is not None and _holds(each(), trained)]


def _holds(model: nn.Module | None, parameters: set[int]) -> bool:
    return model is None or any(id(each) in parameters for each in model.parameters())
