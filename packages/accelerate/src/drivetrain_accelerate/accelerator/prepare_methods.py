"""The methods of an Accelerator that prepare models, optimizers, schedulers and loaders."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain_accelerate.accelerator.held_objects import HeldObjects, trains, whole_state
from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, make_stateful
from drivetrain_accelerate.loaders.prepared_loader import choose_kind, refuse_slicing, skip_first_batches
from drivetrain_accelerate.model_structure import compile_regions, is_compiled_module, recompiled
from drivetrain_accelerate.plugins.deepspeed_objects import (
    DummyOptim,
    DummyScheduler,
    check_said_once,
    optimizer_for,
    scheduler_for,
)
from drivetrain_accelerate.plugins.kwargs_handlers import compile_options, compiles_regions
from drivetrain_accelerate.training.engine_model import DeepSpeedSchedulerWrapper, EngineMethods, as_engine
from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer
from drivetrain_accelerate.training.stepped_scheduler import AcceleratedScheduler
from drivetrain_backends import Scheduler, unwrap_compiled
from drivetrain_data.sharded_loader import is_loader


class PrepareMethods(HeldObjects):
    """The methods that prepare objects, together or one by one."""

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; return other objects as they are.

        Called on all ranks with the same kinds of objects, in any order. `device_placement` changes nothing. A
        ValueError refuses an optimizer whose DeepSpeed engine was ended by `free_memory`.
        """
        given, followers = self._replace_stand_ins(self._take_over(args))
        trained = [each for each in given if self._is_new(each)]
        found: dict[int, Any] = dict(zip(map(id, trained), self._prepare_trained(trained), strict=True))
        # DeepSpeed's configuration makes them: each step of their optimizer advances them, once.
        for each in followers:
            wrapper = DeepSpeedSchedulerWrapper(each, self._advance_with_engine(each))
            found[id(each)] = self._add_scheduler(wrapper)
        results = tuple(found[id(each)] if id(each) in found else self._prepare_other(each) for each in given)
        return results[0] if len(results) == 1 else results

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model alone; with `evaluation_mode`, place it in the run's precision without a wrapper.

        Checkpoints hold the weights in both cases.
        """
        if any(model is each for each in self._models):
            return model
        if evaluation_mode and not self.state.divides_models:
            evaluated = self.inner.prepare_evaluation(model)
            self._models.append(evaluated)
            self._evaluated.append(evaluated)
            # Drivetrain saves what it trains, and others by their names.
            named: dict[str, Any] = {f"evaluation_model_{len(self._models) - 1}": evaluated}
            self.inner.register_for_checkpointing(**named)
            return evaluated
        known = self._prepared_form(model)
        (prepared,) = self._prepare_trained(self._take_over([model])) if known is None else (known,)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader alone; refuse a slicing function. Called on all ranks."""
        refuse_slicing(slice_fn_for_dispatch, "prepare_data_loader(slice_fn_for_dispatch")
        if isinstance(data_loader, DataLoaderAdapter):
            return data_loader
        if self.options.data.use_stateful_dataloader:
            data_loader = make_stateful(data_loader)
        fills = self.options.data.even_batches and self.state.num_processes > 1
        sharded = self.inner.prepare_loader(data_loader, even="pad" if fills else "uneven")
        kind = choose_kind(data_loader, sharded, is_dispatched=self.options.data.dispatch_batches)
        prepared = kind.over(data_loader, sharded, self.state.device)
        dimensions = self.state.parallelism_config
        prepared.adds_shift_labels = dimensions is not None and dimensions.sp_size > 1
        self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> AcceleratedOptimizer:
        """Prepare an optimizer whose model is prepared already."""
        self._take_over([optimizer])
        if not self._is_new(optimizer):
            return optimizer  # pyright: ignore[reportReturnType] it is a prepared one
        (prepared,) = self._prepare_trained([optimizer])
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler: it advances when its optimizer steps."""
        if isinstance(scheduler, AcceleratedScheduler):
            return self._keep_scheduler(scheduler)
        return self._add_scheduler(
            AcceleratedScheduler(
                scheduler,
                self._optimizers_of(scheduler),
                step_with_optimizer=self.options.step_scheduler_with_optimizer,
                split_batches=self.options.data.split_batches,
            )
        )

    def _keep_scheduler(self, prepared: AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a prepared scheduler, and add it to the run again if `free_memory` has removed it."""
        if any(prepared is each for each in self._schedulers):
            return prepared
        if isinstance(prepared, DeepSpeedSchedulerWrapper):
            self._advance_with_engine(prepared.scheduler)
        return self._add_scheduler(prepared)

    def _advance_with_engine(self, scheduler: Any) -> list[AcceleratedOptimizer]:
        """Let a scheduler advance with its optimizer's steps, and add it to the engine's checkpoints."""
        optimizers = self._optimizers_of(scheduler)
        for each in optimizers:
            each.schedules.append(scheduler)
        for model in self._models:
            if isinstance(model, EngineMethods) and any(model.trains(each.optimizer) for each in optimizers):
                model.schedules.append(scheduler)
        return optimizers

    def _optimizers_of(self, scheduler: Any) -> list[AcceleratedOptimizer]:
        """Return the optimizers that a scheduler may belong to: its `optimizer`, or all if it names none of them."""
        its = getattr(scheduler, "optimizer", None)
        return [each for each in self._optimizers if its in (each, each.optimizer)] or self._optimizers

    def _add_scheduler(self, prepared: AcceleratedScheduler) -> AcceleratedScheduler:
        """Add a prepared scheduler, and register it to be saved: drivetrain's own schedulers advance otherwise."""
        self._schedulers.append(prepared)
        named: dict[str, Any] = {f"scheduler_{len(self._schedulers)}": prepared}
        self.inner.register_for_checkpointing(**named)
        return prepared

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the module as the user built it, with the trained parameters."""
        found = self.inner.unwrap_model(model, keep_autocast=keep_fp32_wrapper)
        if not keep_torch_compile:
            return unwrap_compiled(found)
        return (
            recompiled(model, found) if is_compiled_module(model) and not is_compiled_module(found) else found
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return a model's full weights and buffers on the CPU, without a wrapper's prefix. Called on all ranks.

        A ValueError refuses a divided model, unless this Accelerator has prepared it and still holds it.
        """
        return self.inner.get_state_dict(model, everywhere=True) if self._holds(model) else whole_state(model)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out the first batches of its epochs, without reading them."""
        return skip_first_batches(dataloader, num_batches)

    def _replace_stand_ins(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return objects with stand-ins replaced as DeepSpeed's configuration describes, and the new schedules."""
        plugin = self.state.deepspeed_plugin
        if plugin is None:
            return list(given), []
        config = plugin.deepspeed_config
        optimizers = [each for each in given if isinstance(each, Optimizer | DummyOptim)]
        schedulers = [each for each in given if isinstance(each, Scheduler | DummyScheduler)]
        check_said_once(config, optimizers=optimizers, schedulers=schedulers)
        made: dict[int, Any] = {
            id(each): optimizer_for(each, config) for each in optimizers if isinstance(each, DummyOptim)
        }
        first: Any = next(iter(made.values()), next(iter(optimizers), None))
        schedules = {
            id(each): scheduler_for(each, first, config)
            for each in schedulers
            if isinstance(each, DummyScheduler)
        }
        made |= schedules
        for each in optimizers:
            optimizer = made.get(id(each), each)
            # As DeepSpeed does, which has no place for them. Programs that divide parameters by weight decay make one
            # where all are of the other kind, as under LoRA.
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return [made.get(id(each), each) for each in given], list(schedules.values())

    def _prepare_trained(self, trained: list[Any]) -> list[Any]:
        """Prepare models and optimizers together, since backends replace parameters.

        An optimizer may be given before its model, as wrappers of optimizers do: it is prepared with the model.
        """
        # After `free_memory`, a prepared optimizer is prepared again.
        plain = [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in trained]
        self._take_back(plain)
        parameters = {id(one) for one in _parameters_of([*self._models, *plain])}
        early = [each for each in plain if isinstance(each, Optimizer) and not trains(each, parameters)]
        ended = [each for each in trained if isinstance(each, AcceleratedOptimizer) and each.is_released]
        unpaired = {id(each) for each in early} if self.state.deepspeed_plugin is not None else set[int]()
        for each in ended:
            if id(each.optimizer) in unpaired:
                raise ValueError(
                    f"{type(each.optimizer).__name__} holds partitions of a DeepSpeed engine that free_memory() has "
                    "ended, as the second train() of a Trainer does: build an optimizer over model.parameters() and "
                    "prepare both, or build a new Trainer"
                )
        if self.state.divides_models and self._models:
            early = []  # the models hold other parameters by now, which the backend pairs or refuses
        late = [each for each in self._optimizers if each.is_waiting and trains(each.optimizer, parameters)]
        now = [each for each in plain if not any(each is other for other in early)]
        whole = [*now, *(each.optimizer for each in late)]
        found: Any = self.inner.prepare(*whole) if whole else ()
        prepared = [found] if len(whole) == 1 else list(found)
        for each, one in zip(late, prepared[len(now) :], strict=True):
            each.pair(one)
        by_object = dict(zip(map(id, now), prepared[: len(now)], strict=True))
        return [
            self._add_prepared(given, by_object.get(id(each), each))
            for given, each in zip(trained, plain, strict=True)
        ]

    def _take_back(self, trained: Sequence[Any]) -> None:
        """Prepare models that `free_memory` released again, if their optimizer is given without them."""
        if self.state.deepspeed_plugin is None:  # an engine has left its optimizer with parameters of its own
            known = {id(one) for one in _parameters_of([*self._models, *trained])}
            alone = [each for each in trained if isinstance(each, Optimizer) and not trains(each, known)]
            for model in self._released.trained_by(alone):
                self.inner.prepare(unwrap_compiled(model))
                self._models.append(model)
        self._released.drop([each for each in (*self._models, *trained) if isinstance(each, nn.Module)])

    def _add_prepared(self, given: Any, prepared: Any) -> Any:
        """Add a prepared model or optimizer to the run; return its form for programs."""
        if isinstance(prepared, Optimizer):
            stepped = given if isinstance(given, AcceleratedOptimizer) else AcceleratedOptimizer(prepared)
            stepped.pair(prepared)
            self._optimizers.append(stepped)
            return stepped
        model = prepared if self.state.deepspeed_plugin is None else as_engine(prepared, self.inner)
        plugin = self.state.dynamo_plugin
        if plugin is not None and (arguments := compile_options(plugin)) is not None:
            compiled: Any = compile_regions if compiles_regions(plugin) else torch.compile
            model = compiled(model, **arguments)
        self._models.append(model)
        return model

    def _is_new(self, obj: Any) -> bool:
        """Return whether an object is a model or optimizer that is not prepared.

        A prepared optimizer is new again after `free_memory`, if it is a copy, or if it waits for its model in
        another Accelerator.
        """
        if isinstance(obj, AcceleratedOptimizer):
            return obj.is_released or (obj.is_waiting and not any(obj is each for each in self._optimizers))
        if isinstance(obj, nn.Module):
            return self._prepared_form(obj) is None
        return isinstance(obj, Optimizer)

    def _prepare_other(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            return self._prepared_form(obj)
        if isinstance(obj, AcceleratedScheduler):
            return self._keep_scheduler(obj)
        if isinstance(obj, DataLoaderAdapter | AcceleratedOptimizer):
            return obj
        if is_loader(obj):
            return self.prepare_data_loader(obj)
        return self.prepare_scheduler(obj) if isinstance(obj, Scheduler) else obj


def _parameters_of(objects: Sequence[Any]) -> Iterator[nn.Parameter]:
    for each in objects:
        if isinstance(each, nn.Module):
            yield from (one for _, one in nn.Module.named_parameters(each))  # not its own selection
