"""The DeepSpeed backend: one engine for each model with its optimizer."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.backend import ComposedBackend
from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.composed.strategy import Strategy
from drivetrain_backends.composed.transforms import on_one_device
from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, trainable_parameters
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_backends.modules.autocast_forward import prepare_forward, restore_forward
from drivetrain_backends.modules.model_checks import check_values
from drivetrain_backends.optim.parameter_matching import owners, parameter_names
from drivetrain_backends.optim.scheduler import Scheduler
from drivetrain_backends.protocol import AutoValue
from drivetrain_deepspeed import compat
from drivetrain_deepspeed.checks import (
    check_device,
    check_dtypes,
    check_modules,
    check_optimizer,
    check_parameters,
    check_rounding,
)
from drivetrain_deepspeed.config import EngineRun, engine_config
from drivetrain_deepspeed.elementwise import check_elementwise, parts_of
from drivetrain_deepspeed.engine_backward import EngineReducer
from drivetrain_deepspeed.library import entering, load_deepspeed, local_rank_known
from drivetrain_deepspeed.model import EngineModel, uncopyable
from drivetrain_deepspeed.partitioned_parameter import guard
from drivetrain_deepspeed.prepared import DeepSpeedPrepared, remember_groups, share_groups
from drivetrain_deepspeed.settings import DeepSpeedSettings
from drivetrain_precision import Policy
from drivetrain_state import Context

_ENGINE_IS_MADE_FOR_IT = (
    "a DeepSpeed engine lays out its gradients for the number it was started with; set it before prepare(), or call "
    "free_memory() and prepare the model and optimizer again"
)
_DTYPES = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"})


class EngineLayout(StateLayout):
    """The layout of an engine, which holds its optimizer's state itself."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Do nothing, because an engine has taken the state over."""


class DeepSpeedBackend(ComposedBackend):
    """A backend that trains each model with its one optimizer by a DeepSpeed engine.

    Raises:
        BackendNotInstalledError: DeepSpeed is not installed.
        EngineConfigError: The given configuration has unknown keys, or contradicts the run.
        PrecisionError: The run sets a dtype that an engine does not apply.
        RuntimeError: The context has no process group.
    """

    settings_section: ClassVar[str | None] = "deepspeed"
    settings_type: ClassVar[type[Any] | None] = DeepSpeedSettings
    needs_group: ClassVar[bool] = True

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        super().__init__(context, policy, window=window, settings=settings)
        self.config = engine_config(self.settings, self._run())
        self._deepspeed = load_deepspeed(context)
        check_device(policy)
        with entering(context):
            pass
        self._lifetime = ExitStack()  # the lifetime of the engines
        self._undo = ExitStack()  # what a failed `prepare` undoes

    def compose(self) -> Strategy:
        """Return the strategy of untrained models, which need no engine, with the engines' own backwards."""
        check_dtypes(self.policy)
        counts, world_size = self.context.ranks("counts").size, self.context.topology.world_size
        if counts < world_size:
            raise ValueError(
                f"parallelism with {counts} of {world_size} processes data parallel: DeepSpeed's engines average "
                "over all processes. Leave pipeline and tensor out, or use backend='ddp' or 'fsdp'"
            )
        self._reducer = EngineReducer(self.window, self.scaler, self.context.progress)
        return Strategy(
            transforms=on_one_device(self.context, self.policy),
            gradients=self._reducer,
            layout=EngineLayout(self.context),
        )

    @contextmanager
    def building(self) -> Generator[None]:
        """Partition parameters as they are created in the block (stage 3), or create them on the device."""
        if self.config["zero_optimization"]["stage"] < 3:
            with self.context.device:
                yield
            return
        with entering(self.context):
            init = self._deepspeed.zero.Init(config_dict_or_path=self.config)
            compat.call_after_module(init, lambda module: guard(module.parameters(recurse=False)))
            with init:
                yield

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[ComposedPrepared, ...]:
        """Start an engine for each model that comes with an optimizer; see `Backend.prepare`. Called on all ranks.

        Raises:
            ValueError: A model is already prepared, is wrapped by torch.compile in stage 3, is on meta below stage 3,
                or has a parameter that an engine cannot train. Nothing was changed.
            PairingError: See `Backend.prepare`; or two models share an optimizer, or a model has two optimizers.
        """
        with ExitStack() as self._undo:
            self._undo.callback(self._free_window)
            prepared = super().prepare(models, optimizers, schedulers)
            self._undo.pop_all()
        return prepared

    def backward(
        self, loss: Tensor, *, count: Tensor | float | None = None, options: BackwardOptions = ONCE
    ) -> None:
        """Add the gradients of a loss of the only trained model; see `Backend.backward`.

        Raises:
            AccumulationError: There are several trained models.
            PairingError: There is no trained model.
        """
        if not self._trained:
            raise PairingError(
                "backward() before a model was prepared with its optimizer: a DeepSpeed engine is made of both; pass "
                "them to one prepare() call"
            )
        if len(self._trained) > 1:
            raise AccumulationError(
                f"backward(loss) with {len(self._trained)} models that have optimizers: a DeepSpeed engine runs the "
                "backward of its own model; say whose loss it is, backward(loss, model=...)"
            )
        self._tracker.backward(loss, count, self._trained, options=options)

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the first engine."""
        found = {**super().applied(), "reduce_dtype": self.policy.dtypes.said().get("reduce_dtype")}
        is_zero = self.config["zero_optimization"]["stage"] > 0
        if found["on_nonfinite"] == "warn" and is_zero and self.policy.mode_beside_recipe != "bf16":
            found["on_nonfinite"] = AutoValue(value="skip", reason="ZeRO leaves such steps out by itself")
        for engine in self._engines()[:1]:
            found |= read_back(engine.engine, self.settings)
            if self.policy.dtypes.reduce is not None:
                found["reduce_dtype"] = reduction_dtype(engine.engine)
        return found

    def close(self) -> None:
        """End the engines and forget all models."""
        compat.restore_linear()
        super().close()
        self._free_window()
        self._lifetime.close()

    def release(self, prepared: ComposedPrepared) -> None:
        """End a model's engine; see `ComposedBackend.release`."""
        if isinstance(prepared, DeepSpeedPrepared):
            prepared.release()
        else:
            super().release(prepared)

    def plan(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        trained_by: Mapping[nn.Module, Optimizer],
    ) -> None:
        """Refuse models and optimizers that an engine cannot train; see `ComposedBackend.plan`."""
        stage = self.config["zero_optimization"]["stage"]
        if stage < 3:  # in stage 3 each model gets an engine
            super().plan([model for model in models if model not in trained_by], optimizers, trained_by)
        for model in models:
            optimizer = trained_by.get(model)
            check_modules(model, stage, self.context.topology.world_size)
            check_rounding(model, self.config["zero_optimization"], self.policy, self.context.device)
            if stage < 3:
                check_values(model)
            if optimizer is not None:
                check_optimizer(optimizer, stage)
            if optimizer is not None or stage == 3:  # others get no engine
                check_parameters(model, optimizer, stage, is_kept=self.policy.mode_beside_recipe == "no")
            if optimizer is not None and stage:
                check_elementwise(optimizer, stage, **parts_of(self.config, optimizer, self.context))

    def pair(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[tuple[Optimizer, nn.Module]]:
        """Return the model of each optimizer; refuse, before any change, pairs that an engine cannot train."""
        earlier = [prepared.unwrap() for prepared in self._prepared]
        found: dict[nn.Module, Optimizer] = {}
        for optimizer in optimizers:
            indices = owners(optimizer, [*models, *earlier])
            name = type(optimizer).__name__
            if len(indices) > 1:
                raise PairingError(
                    f"{name} trains {len(indices)} models: a DeepSpeed engine trains one; put them into one nn.Module"
                )
            if indices[0] >= len(models):
                raise PairingError(
                    f"{name}: its model was prepared before it; DeepSpeed partitions both together, so pass them to "
                    "one prepare() call"
                )
            model = models[indices[0]]
            if model in found:
                raise PairingError(
                    f"{type(model).__name__} has two optimizers: a DeepSpeed engine has one; use parameter groups"
                )
            found[model] = optimizer
        return [(optimizer, model) for model, optimizer in found.items()]

    def _free_window(self) -> None:
        """Let the number of micro-batches change again, if no engine is left that depends on it."""
        if not self._engines():
            self.window.fixed_because = None

    def _engines(self) -> list[DeepSpeedPrepared]:
        """Return the prepared models that have an engine and an optimizer."""
        return [p for p in self._prepared if isinstance(p, DeepSpeedPrepared) and p.optimizers]

    def _groups(self) -> list[GradientGroup]:
        """Return one group for each prepared model, because each engine steps alone."""
        return [prepared.group for prepared in self._prepared]

    def _run(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> EngineRun:
        reduce = self.policy.dtypes.said().get("reduce_dtype")
        return EngineRun(
            world_size=self.context.topology.world_size,
            gradient_accumulation_steps=self.window.next_num_micro_batches,
            micro_batch_size=self.window.micro_batch_size,
            mode=self.policy.mode_beside_recipe,
            scaling=self.policy.scaling,
            reduce=None if reduce is None else str(reduce),
            num_elements=None
            if model is None
            else sum(map(compat.num_elements, trainable_parameters([model]))),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            optimizer_options={} if optimizer is None else _find_shared_options(optimizer),
        )

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> ComposedPrepared:
        """Start the engine of a model. An untrained model needs an engine only in stage 3, which partitions it."""
        if optimizer is None and self.config["zero_optimization"]["stage"] < 3:
            return super().place(model, None)
        if not any(isinstance(prepared, DeepSpeedPrepared) for prepared in self._prepared):
            self._lifetime.enter_context(local_rank_known(self.context))
        config = engine_config(self.settings, self._run(model, optimizer))
        names = parameter_names({"": model})
        by_engine = "optimizer" in config
        of_optimizer: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        groups = [[names[p] for p in group["params"]] for group in of_optimizer if group["params"]]
        if optimizer is not None:
            self._undo.callback(remember_groups(optimizer))
        prepare_forward(
            model,
            self.policy,
            self.context.device,
            progress=self.context.progress,
            uncopyable=uncopyable(model) if self.config["zero_optimization"]["stage"] == 3 else None,
        )
        with entering(self.context), ExitStack() as undo:
            undo.callback(restore_forward, model)
            undo.callback(compat.release_models, [model])
            with compat.floating_first(model):
                engine, *_ = self._deepspeed.initialize(
                    model=model,
                    optimizer=None if by_engine else optimizer,
                    model_parameters=of_optimizer if by_engine else None,
                    config=config,
                )
            undo.pop_all()
        guard(names)
        if optimizer is not None:
            self.window.fixed_because = _ENGINE_IS_MADE_FOR_IT
            if by_engine:  # schedulers and the loop continue to hold the user's object
                share_groups(engine.basic_optimizer, optimizer)
        return DeepSpeedPrepared(
            EngineModel(engine, self._reducer.notice),
            context=self.context,
            tracker=self._tracker,
            strategy=self.strategy,
            reducer=self._reducer,
            gradients=None if optimizer is None else self._reducer.add(engine, names),
            names=names,
            groups=groups,
        )


def _find_shared_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options that all parameter groups share."""
    first, *others = optimizer.param_groups
    return {
        name: value
        for name, value in first.items()
        if name != "params" and all(group.get(name) == value for group in others)
    }


def read_back(engine: Any, settings: DeepSpeedSettings) -> dict[str, object]:
    """Return the engine's values of the section's fields; an `AutoValue` for a field that the section left open."""
    zero = compat.applied_zero(engine)
    found: dict[str, object] = {
        "stage": int(engine.zero_optimization_stage()),
        "offload_optimizer": _device_of(zero.offload_optimizer),
        "offload_param": _device_of(zero.offload_param),
        "reduce_bucket_size": int(zero.reduce_bucket_size),
        "allgather_bucket_size": int(zero.allgather_bucket_size),
        "overlap_comm": bool(zero.overlap_comm),
        "grad_accum_dtype": compat.accumulation_dtype(engine),
        "communication_data_type": reduction_dtype(engine),
        "config": engine.config,
    }
    reason = "of deepspeed.config" if settings.config is not None else "not said, so chosen for the run"
    left_open = {name for name in found if getattr(settings, name) is None} | {"config"}
    return {
        name: AutoValue(value=value, reason=reason if name != "config" else "filled in from the run")
        if name in left_open
        else value
        for name, value in found.items()
    }


def reduction_dtype(engine: Any) -> str:
    """Return the name of the dtype in which ranks add up gradients."""
    return _DTYPES.get(engine.communication_data_type, "as DeepSpeed chooses")


def _device_of(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
