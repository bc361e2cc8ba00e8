"""Sort the arguments of `prepare` by kind, prepare each kind, and return the results in order."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain_backends import (
    Backend,
    Prepared,
    PreparedOptimizer,
    PreparedScheduler,
    Scheduler,
    unwrap_compiled,
)
from drivetrain_data import ShardedLoader, is_loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The arguments of a `prepare` call by kind, each list in the order of the call."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[Scheduler]
    loaders: list[Any]


def sort_objects(objects: Sequence[object]) -> Sorted:
    """Sort objects by kind.

    Raises:
        TypeError: An object is of a kind that cannot be prepared; the message gives its position and type.
        ValueError: An object is already prepared, or is given twice.
    """
    found = Sorted(models=[], optimizers=[], schedulers=[], loaders=[])
    for place, obj in enumerate(objects):
        if isinstance(obj, (PreparedOptimizer, PreparedScheduler, ShardedLoader)):
            raise ValueError(f"prepare(): argument {place} is a {type(obj).__name__} and prepared already")
        if any(obj is earlier for earlier in objects[:place]):
            raise ValueError(f"prepare(): argument {place} ({type(obj).__name__}) comes twice")
        _list_for(obj, found, place).append(obj)
    return found


def prepare_objects(
    objects: Sequence[object], backend: Backend, shard: Callable[[Any, int], ShardedLoader[Any]]
) -> tuple[list[object], tuple[Prepared, ...], list[ShardedLoader[Any]]]:
    """Prepare objects and return the results in the order of the originals.

    Args:
        objects: Models, optimizers, schedulers and loaders, in any order.
        backend: The backend that prepares models together with their optimizers and schedulers.
        shard: A function that prepares a loader, given its index among the loaders.

    Returns:
        The prepared objects in the order given, the models with their optimizers and schedulers, and the loaders.
    """
    found = sort_objects(objects)
    # Loaders first: they cannot fail half-way, and a bad one must not leave models changed.
    loaders = [shard(loader, place) for place, loader in enumerate(found.loaders)]
    sizes = {loader.batch_size for loader in loaders}
    if len(sizes) == 1:
        backend.window.micro_batch_size = sizes.pop()
    prepared = backend.prepare(found.models, found.optimizers, found.schedulers)
    replaced: dict[int, object] = {id(old): new for old, new in zip(found.loaders, loaders, strict=True)}
    for one in prepared:
        replaced[id(one.unwrap())] = one.model
        replaced |= {id(optimizer.optimizer): optimizer for optimizer in one.optimizers}
        replaced |= {id(scheduler.scheduler): scheduler for scheduler in one.schedulers}
    return [replaced[id(obj)] for obj in objects], prepared, loaders


def _list_for(obj: object, found: Sorted, place: int) -> list[Any]:
    if isinstance(obj, nn.Module):
        return found.models
    if isinstance(obj, Optimizer):
        return found.optimizers
    if isinstance(obj, DataLoader):
        return found.loaders
    if isinstance(obj, Scheduler):
        if hasattr(obj, "zero_grad"):
            raise TypeError(
                f"prepare(): argument {place} ({type(obj).__name__}) steps parameters and is no "
                "torch.optim.Optimizer, so that neither its windows nor its state could be kept: derive it from "
                "torch.optim.Optimizer, with param_groups, state, state_dict and load_state_dict"
            )
        return found.schedulers
    if is_loader(obj):
        return found.loaders
    raise TypeError(
        f"prepare(): argument {place} is of type {type(obj).__name__}, which cannot be prepared; allowed are "
        "nn.Module, Optimizer, DataLoader (or any iterable of batches with a .dataset, or with state_dict and "
        "load_state_dict) and a scheduler with .optimizer, "
        "step, state_dict and load_state_dict. Leave other objects out, and register what must be saved with "
        "register_for_checkpointing"
    )


class PreparedModels:
    """The models that an Accelerator has prepared, found by module or by parameters.

    Args:
        on_step: A function called whenever one of the optimizers ends a window.

    Attributes:
        all: The prepared models, in the order they were prepared.
        optimizers: The prepared optimizers, in the order they were given to `prepare`.
        schedulers: The prepared schedulers, in the order they were given to `prepare`.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.all: list[Prepared] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self._holders: dict[Tensor, Prepared] = {}
        self._on_step = on_step

    def add(self, prepared: Sequence[Prepared], results: Sequence[object]) -> None:
        """Add new models, and new optimizers of known models.

        Args:
            prepared: The models that are new, or that have gained an optimizer or scheduler.
            results: The results of `prepare`, in its order.
        """
        self.optimizers += [one for one in results if isinstance(one, PreparedOptimizer)]
        self.schedulers += [one for one in results if isinstance(one, PreparedScheduler)]
        for one in prepared:
            if one not in self.all:
                self.all.append(one)
                for parameter in one.unwrap().parameters():
                    self._holders.setdefault(parameter, one)
            for optimizer in one.optimizers:
                optimizer.on_step = self._on_step

    def clear(self) -> None:
        """Forget all models, optimizers and schedulers."""
        self.all.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self._holders.clear()

    def untie(self) -> None:
        """Drop the models' references to their optimizers and schedulers, which would form reference cycles.

        Objects that the user still holds keep working: an optimizer needs its model, but not the reverse.
        """
        for one in self.all:
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
                f"{model!r} is no model: give what prepare() returned for one, or several in a tuple"
            )
        for one in self.all:
            if any(given in (one.model, one.unwrap()) for given in (model, unwrap_compiled(model))):
                return one
        raise ValueError(
            f"{type(model).__name__} was not prepared by this Accelerator; pass it to prepare() first, and then "
            "what prepare() returned"
        )

    def unwrap(self, model: nn.Module, *, keep_autocast: bool) -> nn.Module:
        """Return the user's module; without autocast, a shallow copy of its own class on the same parameters."""
        inner = model
        while True:
            given = (inner, unwrap_compiled(inner))  # the user may have compiled it after prepare()
            found = next((one.unwrap() for one in self.all if one.model in given), inner)
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
        if len(self.all) == 1:
            return self.all[0]
        if parameters and parameters[0] in self._holders:
            return self._holders[parameters[0]]
        for one in self.all:  # a gathered model has other parameter objects
            if parameters and any(parameters[0] is parameter for parameter in one.unwrap().parameters()):
                return one
        raise ValueError(
            f"the {len(parameters)} parameters to clip belong to no prepared model; pass model.parameters() of one"
        )
