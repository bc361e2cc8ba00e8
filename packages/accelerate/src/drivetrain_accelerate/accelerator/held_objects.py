"""The objects of a run: hold them, release them, and take over the objects of another Accelerator."""

import gc
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_accelerate.accelerator.composed_run import ComposedRun
from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter
from drivetrain_accelerate.model_structure import extract_model_from_parallel
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.training.engine_model import EngineMethods
from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer
from drivetrain_accelerate.training.stepped_scheduler import AcceleratedScheduler
from drivetrain_backends import restore_forward, strip_wrapper_prefix, unwrap_compiled
from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_checkpoint import plan_export, write_export
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_main
from drivetrain_weights import find_ties
from drivetrain_weights.tensor_box import is_dtensor


class ReleasedModels(WeakKeyDictionary[nn.Module, None]):
    """Models that `free_memory` released and the program still holds, in the order of their preparation.

    A Trainer calls `free_memory` between two trainings. It keeps the prepared model, and then prepares its optimizer
    alone.
    """

    def drop(self, models: Sequence[nn.Module]) -> None:
        """Forget models that are prepared again. They may be given in prepared form or as the user built them."""
        for model in self._with_any({id(each) for one in models for each in one.parameters()}):
            del self[model]

    def trained_by(self, optimizers: Sequence[Optimizer]) -> list[nn.Module]:
        """Return the released models whose parameters the optimizers hold."""
        if not self or not optimizers:
            return []
        gc.collect()  # ranks are to agree: what the program let go of is not to be found on one of them
        return self._with_any({id(one) for each in optimizers for one in _parameters_of(each)})

    def _with_any(self, parameters: set[int]) -> list[nn.Module]:
        return [model for model in self if any(id(each) in parameters for each in model.parameters())]


class HeldObjects(ComposedRun):
    """The prepared objects of a run, by kind and in the order of their preparation."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoaderAdapter] = []
        self._evaluated: list[nn.Module] = []
        self._released = ReleasedModels()
        AcceleratorState.accelerators.add(self)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects, release the given objects, and return a None for each given object.

        If the program keeps a model, it is prepared again together with an optimizer that trains it.
        """
        if self._inner is not None:
            self.inner.unregister_from_checkpointing(*self._schedulers, *self._evaluated)
        engines = [each for each in self._models if isinstance(each, EngineMethods)]
        for holder in (*self._optimizers, *engines):
            holder.schedules.clear()
        self._released.update(dict.fromkeys(each for each in self._models if each not in self._evaluated))
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders, self._evaluated):
            kept.clear()
        self.gradient_state.is_window_set = False
        self.gradient_state.sync_gradients = True
        return [] if self._inner is None and not objects else list(self.inner.free_memory(*objects))

    clear = free_memory

    def _holds(self, model: object) -> bool:
        """Return whether the run trains a model; False for an object that is no model."""
        return self._inner is not None and isinstance(model, nn.Module) and self._inner.has_prepared(model)

    def _prepared_form(self, model: nn.Module) -> nn.Module | None:
        """Return the prepared form of a model, given as prepared or as the user built it; None if not prepared."""
        of_user = (each for each in self._models if model in (each, self.inner.unwrap_model(each)))
        return next(of_user, None)

    def _take_over(self, given: Sequence[Any]) -> list[Any]:
        """Return objects, with another Accelerator's prepared models as the user built them. Called on all ranks.

        The other Accelerator releases these objects. It may be deleted already, as when a notebook's cell runs twice.
        """
        taken = [self._restore_built(each) if isinstance(each, nn.Module) else each for each in given]
        models = [*self._models, *(each for each in taken if isinstance(each, nn.Module))]
        trained = {id(one) for model in models for _, one in nn.Module.named_parameters(model)}
        for each in given:
            is_own = any(each is own for own in self._optimizers)
            if isinstance(each, AcceleratedOptimizer) and not is_own and trains(each.optimizer, trained):
                each.release()
        return taken

    def _restore_built(self, model: nn.Module) -> nn.Module:
        """Return a model as the user built it if another Accelerator prepared it; any other model as it is."""
        inner = unwrap_compiled(model)
        forms = [each for each in (model, inner) if isinstance(each, PreparedForward)]
        built = inner.module if isinstance(inner, ModuleProxy) else next(iter(forms), None)
        if built is None or model in self._released or self._prepared_form(model) is not None:
            return model
        if self.state.num_processes > 1:
            gc.collect()  # ranks are to agree on whether the other one is gone
        others = [
            each
            for each in AcceleratorState.accelerators
            if each is not self and each.is_composed and each._prepared_form(model) is not None
        ]
        if self.state.divides_models:
            raise ValueError(
                f"{type(built).__name__} was prepared by another Accelerator of this process, which divided its "
                "parameters among ranks: train it with that one, or build the model and its optimizer anew and "
                "prepare these; in a notebook, run the cell that builds them again"
            )
        for other in others:
            other.free_memory()
        return restore_forward(built)


def trains(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Return whether an optimizer holds any of the parameters; `parameters` has the id of each."""
    return any(id(one) in parameters for one in _parameters_of(optimizer))


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights and buffers on the CPU by plain names, with the values of offloaded modules."""
    # Few runs ask for it.
    from drivetrain_accelerate.models.align_devices import get_state_dict_offloaded_model

    state = get_state_dict_offloaded_model(_checked(model))
    return {strip_wrapper_prefix(name): value.detach().cpu() for name, value in state.items()}


def save_whole(context: Context, model: nn.Module, folder: Path, *, max_shard_size: int | str) -> None:
    """Write a model's weights and buffers as safetensors, from the main process. Called on all ranks."""
    inner = _checked(model)

    def write() -> None:
        state = whole_state(inner)
        found = find_ties(inner, rename=strip_wrapper_prefix)
        ties = {name: first for name, first in found.items() if name in state}
        write_export(plan_export(state, max_shard_size=max_shard_size, ties=ties), state.items(), folder)

    on_main(context, write, doing=f"the export into {folder}")


def _checked(model: nn.Module) -> nn.Module:
    """Return the module without wrappers; ValueError if its parameters are divided among ranks."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(f"{model!r} is not a model: pass an nn.Module")
    divided = [name for name, each in model.named_parameters() if is_dtensor(each) or hasattr(each, "ds_id")]
    if divided:
        raise ValueError(
            f"{type(model).__name__} has {len(divided)} parameters that are divided among ranks, such as "
            f"{divided[0]}, and this Accelerator did not prepare it, or has forgotten it since: take its weights on "
            "the Accelerator that prepared it, before free_memory() and end_training()"
        )
    return extract_model_from_parallel(model, keep_torch_compile=False)
