"""DeepSpeed's model, engine, optimizer and schedule, with the methods that programs call.

An engine's checkpoint is the folder `FOLDER/global_stepN`. Any number of ranks can load it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.extension import as_in, frozen_names, mark_replicas
from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer, add_position, take_position
from drivetrain_accelerate.training.stepped_scheduler import AcceleratedScheduler
from drivetrain_backends import Prepared
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, NoCheckpointError

_LATEST = "latest"
_MODEL = "model"


class EngineMethods:
    """The methods of DeepSpeed's engine by which programs save and inspect a model.

    Other attributes are the model's, or else the engine's.
    """

    accelerator: Accelerator
    schedules: list[Any]  # which advance with the model's optimizer; a checkpoint holds them too
    engine: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] the module's
        except AttributeError:
            if (engine := self.__dict__.get("engine")) is None:
                raise
            return getattr(engine, name)

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration. The unwrapped model has the model's own `config`."""
        return self.engine.config

    def get_global_grad_norm(self) -> float | None:
        """Return the gradients' norm of this window, or of the last step; None at first. Called on all ranks."""
        prepared = self._prepared()
        norm = prepared.clip(norm=self.engine.gradient_clipping() or math.inf)
        for optimizer in prepared.optimizers:
            if norm is None and optimizer.last_result is not None:
                norm = optimizer.last_result.grad_norm
        return None if norm is None else norm.item()

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a RuntimeError: only the Accelerator's backward knows the window of accumulation."""
        raise RuntimeError("engine.backward(loss): call accelerator.backward(loss), which knows the window")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a RuntimeError: the prepared optimizer steps when its window closes."""
        raise RuntimeError("engine.step(): call optimizer.step() of the prepared optimizer")

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model, its optimizer and its schedules. Any number of ranks can load them. Called on all ranks."""
        prepared = self._prepared()
        step = max((each.num_steps for each in prepared.optimizers), default=0)
        folder, name = Path(save_dir), str(tag or f"global_step{step}")
        state = mark_replicas(prepared.state_dict(), prepared)
        model = state.pop("model")
        left_out = frozen_names(prepared) if exclude_frozen_parameters else frozenset[str]()
        beside = {
            "optimizer": add_position({}),
            "client_state": dict(client_state or {}),
            "schedules": [each.state_dict() for each in self.schedules],
        }
        checkpointer = self._checkpointer(folder / name)
        checkpointer.save(
            step,
            models={_MODEL: {key: value for key, value in model.items() if key not in left_out}},
            replicated={
                "training": {_MODEL: state},
                "beside": beside,
                "trained_only": exclude_frozen_parameters,
            },
            per_rank={},
        )
        checkpointer.close()
        if save_latest and self.accelerator.context.topology.is_main:
            (folder / _LATEST).write_text(name)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, Mapping[str, Any]]:
        """Load a checkpoint of `save_checkpoint`, saved on any number of ranks; return its folder and client state.

        Called on all ranks. A missing checkpoint raises a FileNotFoundError or NoCheckpointError, and DeepSpeed's own
        format a NoCheckpointError. A ValueError refuses another model's checkpoint, or one without frozen parameters.
        """
        place = _find_checkpoint(Path(load_dir), tag)
        prepared = self._prepared()
        loaded = self._checkpointer(place).load(like=as_in({_MODEL: prepared.state_dict()["model"]}))
        own = prepared.state_dict()
        model: Mapping[str, Any] = loaded.models[_MODEL]
        if loaded.replicated["trained_only"]:
            if load_module_strict:
                raise ValueError(
                    f"{place} holds no frozen parameters: say load_module_strict=False, which keeps the model's own"
                )
            model = {**own["model"], **model}
        with_optimizer = load_optimizer_states and not load_module_only
        training = loaded.replicated["training"][_MODEL] if with_optimizer else own
        prepared.load_state_dict({**training, "model": model})
        beside: Mapping[str, Any] = loaded.replicated["beside"]
        if with_optimizer:
            take_position(beside["optimizer"])
        if load_lr_scheduler_states and not load_module_only:
            for schedule, state in zip(self.schedules, beside["schedules"], strict=True):
                schedule.load_state_dict(state)
        return str(place), beside["client_state"]

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights into one file, in the dtype that the model computes in. Called on all ranks."""
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if self.accelerator.context.topology.is_main:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(weights, Path(save_dir) / save_filename)
        self.accelerator.wait_for_everyone()
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Return the whole weights in the dtype that the model computes in. Called on all ranks."""
        dtypes = {name: each.dtype for name, each in self.engine.module.named_parameters()}
        left_out = frozen_names(self._prepared()) if exclude_frozen_parameters else frozenset[str]()
        weights = self.accelerator.get_state_dict(self.engine.module, everywhere=True)
        return {
            name: each.to(dtypes.get(name, each.dtype))
            for name, each in weights.items()
            if name not in left_out
        }

    def trains(self, optimizer: Any) -> bool:
        """Return whether this user's optimizer is stepped by the engine."""
        return any(each.optimizer is optimizer for each in self._prepared().optimizers)

    def _prepared(self) -> Prepared:
        return self.accelerator.prepared_of(self.engine.module)

    def _checkpointer(self, place: Path) -> Checkpointer:
        return Checkpointer(self.accelerator.context, place, settings=CheckpointSettings(keep_last=1))


def _find_checkpoint(folder: Path, tag: str | None) -> Path:
    """Return the folder of a checkpoint by its tag, by default of the latest checkpoint."""
    if not tag and not (folder / _LATEST).is_file():
        raise FileNotFoundError(f"{folder} has no file {_LATEST} that names a checkpoint: say tag=")
    place = folder / (tag or (folder / _LATEST).read_text().strip())
    if any(place.glob("*model_states.pt")):
        raise NoCheckpointError(
            f"{place} holds files of DeepSpeed's own: merge its weights by zero_to_fp32.py, which lies beside them, "
            "load these into the model, and start the optimizer anew"
        )
    return place


def as_engine(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Add the engine's methods to a prepared model, in place; a model without an engine stays as it is.

    The model's class changes to a subclass named DeepSpeedEngine, since programs check that name.
    """
    kind = type(model)
    if "engine" in vars(model) and not issubclass(kind, EngineMethods):
        model.__dict__.update(accelerator=accelerator, schedules=[])
        model.__class__ = type("DeepSpeedEngine", (EngineMethods, kind), {})
    return model


class DeepSpeedEngineWrapper:
    """An engine that steps inside `backward` if gradients are to be reduced."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run backward, and the optimizer's step if `sync_gradients` is true. Called on all ranks."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients at the last step; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that the engine steps."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears the gradients in its step."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as in Accelerate
        """Do nothing: `DeepSpeedEngineWrapper.backward` has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that advances with the optimizer's step. A program's own call of `step` does nothing."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as in Accelerate
        """Do nothing: the schedule has advanced with its optimizer."""
