"""The objects that an Accelerator has prepared."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from drivetrain_backends import (
    AccumulationError,
    Prepared,
    PreparedOptimizer,
    PreparedScheduler,
    restore_forward,
    unwrap_compiled,
)
from drivetrain_data import ShardedLoader


class PreparedObjects:
    """The objects that an Accelerator has prepared; models are found by module or by parameters.

    Args:
        on_step: Functions called, in order, whenever one of the optimizers ends a window.

    Attributes:
        models: The prepared models, in the order they were prepared.
        optimizers: The prepared optimizers, in the order they were given to `prepare`.
        schedulers: The prepared schedulers, in the order they were given to `prepare`.
        loaders: The prepared loaders, in the order they were given to `prepare`.
        lengths: The numbers of batches of a loader before and after `prepare`, for loaders whose lengths are
            compared; each None if unknown.
        counted_steps: The results of `num_steps` so far, which the program uses for schedules.
        told_schedulers: The schedulers for which a warning has said that their length fits no prepared loader.
        evaluated: The models that are prepared for evaluation alone, as long as the program holds them.
        on_step: The same functions; more may be added before anything is prepared.
    """

    def __init__(self, on_step: list[Callable[[], None]]) -> None:
        self.models: list[Prepared] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[ShardedLoader[Any]] = []
        self.lengths: dict[ShardedLoader[Any], tuple[int | None, int | None]] = {}
        self.counted_steps: set[int] = set()
        self.told_schedulers: set[PreparedScheduler] = set()
        self.evaluated: WeakSet[nn.Module] = WeakSet()
        self._holders: dict[Tensor, Prepared] = {}
        self._trained: list[Prepared] = []  # the models with optimizers
        self.on_step = on_step

    def add(self, prepared: Sequence[Prepared], results: Sequence[object]) -> None:
        """Add new objects, and new optimizers of known models.

        Args:
            prepared: The models that are new, or that have gained an optimizer or scheduler.
            results: The results of `prepare`, in its order.
        """
        self.optimizers += [one for one in results if isinstance(one, PreparedOptimizer)]
        self.schedulers += [one for one in results if isinstance(one, PreparedScheduler)]
        self.loaders += [one for one in results if isinstance(one, ShardedLoader)]
        for one in prepared:
            if one not in self.models:
                self.models.append(one)
                for parameter in _parameters_of(one.unwrap()):
                    self._holders.setdefault(parameter, one)
            for optimizer in one.optimizers:
                # A known one keeps what it has: more may have been added since.
                optimizer.on_step = optimizer.on_step or tuple(self.on_step)

        self._trained = [one for one in self.models if one.optimizers]

    def clear(self) -> None:
        """Forget all objects. Models prepared for evaluation keep the run's precision until they are trained."""
        for objects in (self.models, self.optimizers, self.schedulers, self.loaders, self._trained):
            objects.clear()
        for known in (self.lengths, self.counted_steps, self.told_schedulers, self._holders):
            known.clear()

    def restore_evaluated(self, models: Sequence[nn.Module]) -> None:
        """Undo `prepare_evaluation` for models that are now to be trained."""
        plain = [self.unwrap(each, keep_autocast=True) for each in models]
        restored = [each for each in self.evaluated if each in plain]
        self.evaluated.difference_update(restored)
        for each in restored:
            restore_forward(each)

    def untie(self) -> None:
        """Drop the models' references to their optimizers and schedulers, which would form reference cycles.

        Objects that the user still holds keep working: an optimizer needs its model, but not the reverse.
        """
        for one in self.models:
            one.optimizers.clear()
            one.schedulers.clear()

    def of(self, model: nn.Module) -> Prepared:
        """Find a model by the module that `prepare` returned, or by the user's own module.

        Raises:
            TypeError: The argument is not a module.
            ValueError: The model was not prepared by this Accelerator.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise TypeError(
                f"{model!r} is not a model: pass the model that prepare() returned, or several in a tuple"
            )
        if (found := self.find(model)) is None:
            raise ValueError(
                f"{type(model).__name__} was not prepared by this Accelerator; pass it to prepare() first, and then "
                "what prepare() returned"
            )
        return found

    def trained(self, model: nn.Module | None) -> Prepared:
        """Find a model as `of` does; for None, return the only one with optimizers."""
        if model is None and len(self._trained) != 1:
            raise AccumulationError(
                f"train_step() trains one model, and {len(self._trained)} prepared models have optimizers: prepare() "
                "one with its optimizer, or say which one with model=; a loss of several models needs accumulate() "
                "and backward()"
            )
        return self._trained[0] if model is None else self.of(model)

    def find(self, model: nn.Module) -> Prepared | None:
        """Find a model as `of` does; None if it is not prepared."""
        given = (model, unwrap_compiled(model))
        return next((one for one in self.models if any(m in (one.model, one.unwrap()) for m in given)), None)

    def unwrap(self, model: nn.Module, *, keep_autocast: bool) -> nn.Module:
        """Return the user's module; without autocast, a shallow copy of the user's class on the same parameters."""
        inner = model
        while True:
            given = (inner, unwrap_compiled(inner))  # the user may have compiled it after prepare()
            found = next((one.unwrap() for one in self.models if one.model in given), inner)
            inside = unwrap_compiled(found)
            wraps = isinstance(inside, (nn.DataParallel, nn.parallel.DistributedDataParallel))
            inner = inside.module if wraps else found
            if inner is found:
                return inner if keep_autocast else copy(inner)

    def holding(self, parameters: Sequence[Tensor]) -> Prepared:
        """Find the model that parameters belong to, by the first parameter.

        Raises:
            ValueError: There are no parameters, or they belong to no prepared model.
        """
        if len(self.models) == 1:
            return self.models[0]
        if parameters and parameters[0] in self._holders:
            return self._holders[parameters[0]]
        for one in self.models:  # a gathered model has other parameter objects
            if parameters and any(parameters[0] is parameter for parameter in _parameters_of(one.unwrap())):
                return one
        raise ValueError(
            f"the {len(parameters)} parameters to clip belong to no prepared model; pass model.parameters() of one"
        )


def _parameters_of(module: nn.Module) -> Iterator[Tensor]:
    """Return all parameters of a module, even if its class overrides `parameters` to leave some out."""
    return (parameter for _, parameter in nn.Module.named_parameters(module))
