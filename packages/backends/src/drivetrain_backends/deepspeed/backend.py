"""The DeepSpeed backend: one engine for each model with its optimizer."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.deepspeed.applied import read_back
from drivetrain_backends.deepspeed.checks import (
    check_device,
    check_optimizer,
    check_parameters,
    check_rounding,
    check_wrapper,
)
from drivetrain_backends.deepspeed.compat import num_elements
from drivetrain_backends.deepspeed.config import EngineRun, engine_config
from drivetrain_backends.deepspeed.elementwise import check_elementwise, parts_of
from drivetrain_backends.deepspeed.engine_backward import EngineCarrier
from drivetrain_backends.deepspeed.library import entering, load_deepspeed, local_rank_known
from drivetrain_backends.deepspeed.model import EngineModel
from drivetrain_backends.deepspeed.optimizer import PartitionedOptimizer, remember_groups, share_groups
from drivetrain_backends.deepspeed.prepared import DeepSpeedPrepared
from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.engine import trainable_parameters
from drivetrain_backends.gradients.tracker import GradientLedger
from drivetrain_backends.modules.activation_checkpointing import checkpoint_activations, restore_activations
from drivetrain_backends.modules.autocast_forward import prepare_forward, restore_forward
from drivetrain_backends.modules.meta_check import check_values
from drivetrain_backends.modules.wrap_policy import plan_blocks
from drivetrain_backends.optim.optimizer import PreparedOptimizer
from drivetrain_backends.optim.parameter_matching import owners, parameter_names
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_backends.protocol import AutoValue, Prepared
from drivetrain_backends.settings import DeepSpeedSettings
from drivetrain_backends.torch.base import check_new, check_schedulers
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_precision import LossScaler, Policy
from drivetrain_state import Context

_ENGINE_IS_MADE_FOR_IT = (
    "a DeepSpeed engine lays out its gradients for the number it was started with; set it before prepare(), or call "
    "free_memory() and prepare the model and optimizer again"
)


class DeepSpeedBackend:
    """A backend that trains each model with its one optimizer by a DeepSpeed engine.

    Args:
        context: The ranks and the device; it has a process group.
        policy: The precision that models compute in.
        window: The accumulation window; the caller begins its micro-batches.
        settings: The `deepspeed` section.

    Raises:
        BackendNotInstalledError: DeepSpeed is not installed.
        EngineConfigError: The given configuration has unknown keys, or contradicts the run.
        RuntimeError: The context has no process group.
    """

    settings_section: ClassVar[str | None] = "deepspeed"
    settings_type: ClassVar[type[Any] | None] = DeepSpeedSettings
    needs_group: ClassVar[bool] = True

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        self.context = context
        self.policy = policy
        self.window = window
        self.settings: DeepSpeedSettings = settings or DeepSpeedSettings()
        self.config = engine_config(self.settings, self._run())
        self.scaler = None if policy.scaling is None else LossScaler(context.device, policy.scaling)
        self._deepspeed = load_deepspeed(context)
        check_device(policy)
        with entering(context):
            pass
        self._carrier = EngineCarrier(window, self.scaler)
        self._ledger = GradientLedger(context, window, self.scaler, self._carrier)
        self._lifetime = ExitStack()  # the lifetime of the engines
        self._prepared: list[DeepSpeedPrepared] = []
        self._untrained: list[TorchPrepared | DeepSpeedPrepared] = []  # models without an optimizer

    @contextmanager
    def building(self) -> Generator[None]:
        """Partition parameters as they are created in the block (stage 3), or create them on the device."""
        if self.config["zero_optimization"]["stage"] < 3:
            with self.context.device:
                yield
            return
        with entering(self.context), self._deepspeed.zero.Init(config_dict_or_path=self.config):
            yield

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[Prepared, ...]:
        """Start an engine for each model that comes with an optimizer; see `Backend.prepare`. Called on all ranks.

        Raises:
            ValueError: A model is already prepared, is wrapped by torch.compile in stage 3, is on meta below stage 3,
                or has a parameter that an engine cannot train. Nothing was changed.
            PairingError: See `Backend.prepare`; or two models share one optimizer, or one model has two.
        """
        known = [
            *optimizers,
            *(one for p in self._prepared for o in p.optimizers for one in (o, o.optimizer)),
        ]
        check_new(models)
        check_schedulers(schedulers, known)
        trained_by = self._pair(models, optimizers)
        self._check(models, trained_by)
        if not (self._prepared or self._untrained):
            self._lifetime.enter_context(local_rank_known(self.context))
        new: list[Prepared] = []
        with ExitStack() as undo:
            for model in models:
                if model in trained_by:
                    undo.callback(remember_groups(trained_by[model]))
                started = self._start(model, trained_by.get(model))
                undo.callback(self._take_back, started)
                new.append(started)
            undo.pop_all()
        for scheduler in schedulers:
            prepared, optimizer = self._trained_by(scheduler.optimizer)
            prepared.schedulers.append(PreparedScheduler(scheduler, optimizer))
            new.append(prepared)
        self._ledger.first_losses.renew()
        return tuple(dict.fromkeys(new))

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of a loss of the only trained model; see `Backend.backward`.

        Raises:
            AccumulationError: There are several trained models.
            PairingError: There is no trained model.
        """
        if not self._prepared:
            raise PairingError(
                "backward() before a model was prepared with its optimizer: a DeepSpeed engine is made of both; pass "
                "them to one prepare() call"
            )
        if len(self._prepared) > 1:
            raise AccumulationError(
                f"backward(loss) with {len(self._prepared)} models that have optimizers: a DeepSpeed engine runs the "
                "backward of its own model; say whose loss it is, backward(loss, model=...)"
            )
        self._prepared[0].backward(loss, count=count)

    def backward_of(
        self, models: Sequence[Any], loss: Tensor, *, count: Tensor | float | None = None
    ) -> None:
        """Add the gradients of a loss of one model; see `Backend.backward_of`.

        Raises:
            AccumulationError: There are several models; an engine trains one.
        """
        chosen = [one.group for one in self._prepared if any(one is prepared for prepared in models)]
        self._ledger.backward(loss, count, chosen)

    def join(self, models: Sequence[nn.Module]) -> NoReturn:
        """Refuse to join; see `Backend.join`.

        Raises:
            RuntimeError: Raised by every call: all ranks must step equally often.
        """
        del models
        raise RuntimeError(
            "join_uneven_inputs: DeepSpeed's engines hang when a rank steps less often; prepare the loader, whose "
            "tails keep ranks in step"
        )

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the first engine."""
        found: dict[str, object] = {
            "device": str(self.context.device),
            "gradient_accumulation_steps": self.window.next_num_micro_batches,
            "mixed_precision": self.policy.mode,
            "loss_scaling": self.scaler is not None,
            "nonfinite_gradients": self._guard(),
        }
        for prepared in self._prepared[:1]:
            found |= prepared.applied() | read_back(prepared.engine, self.settings)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if there is one, and the reference count of counted losses."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale of a saved run.

        Raises:
            ValueError: Only one of the saved run and this one scales its loss.
        """
        self._ledger.load_state_dict(state)

    def close(self) -> None:
        """End the engines and forget all models."""
        for prepared in [*self._prepared, *self._untrained]:
            prepared.release()
            for optimizer in prepared.optimizers:
                optimizer.release()
        self._prepared, self._untrained, self._ledger.groups = [], [], []
        self.window.fixed_because = None
        self.window.reset()
        self._lifetime.close()

    def _check(self, models: Sequence[nn.Module], trained_by: Mapping[nn.Module, Optimizer]) -> None:
        """Refuse models and optimizers that an engine cannot train."""
        stage = self.config["zero_optimization"]["stage"]
        for model in models:
            optimizer = trained_by.get(model)
            check_wrapper(model, stage)
            check_rounding(model, self.config["zero_optimization"], self.policy, self.context.device)
            if stage < 3:
                check_values(model)
            if optimizer is not None:
                check_optimizer(optimizer, stage)
            if optimizer is not None or stage == 3:  # others get no engine
                check_parameters(model, optimizer, stage)
            if optimizer is not None and stage:
                check_elementwise(optimizer, stage, **parts_of(self.config, optimizer, self.context))

    def _take_back(self, prepared: TorchPrepared | DeepSpeedPrepared) -> None:
        """Undo the start of an engine after a later one in the same call has failed."""
        prepared.release()
        self._prepared = [one for one in self._prepared if one is not prepared]
        if not self._prepared:
            self.window.fixed_because = None
        self._untrained = [one for one in self._untrained if one is not prepared]
        self._ledger.groups = [group for group in self._ledger.groups if group is not prepared.group]

    def _guard(self) -> object:
        """Return how non-finite gradients are treated."""
        asked = self.window.nonfinite_gradients
        if asked == "ignore" and self.config["zero_optimization"]["stage"] and self.policy.mode != "bf16":
            return AutoValue(value="skip", reason="ZeRO leaves such steps out by itself")
        return asked

    def _run(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> EngineRun:
        return EngineRun(
            world_size=self.context.topology.world_size,
            gradient_accumulation_steps=self.window.next_num_micro_batches,
            micro_batch_size=self.window.micro_batch_size,
            mode=self.policy.mode,
            scaling=self.policy.scaling,
            num_elements=None if model is None else _num_elements(model),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            optimizer_options={} if optimizer is None else _shared_options(optimizer),
        )

    def _pair(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[nn.Module, Optimizer]:
        """Return the optimizer of each model, or refuse, before any change, pairs that an engine cannot train."""
        earlier = [p.unwrap() for p in [*self._prepared, *self._untrained]]
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
        return found

    def _start(self, model: nn.Module, optimizer: Optimizer | None) -> TorchPrepared | DeepSpeedPrepared:
        """Prepare one model, with an engine if it has an optimizer."""
        return self._place(model) if optimizer is None else self._train(model, optimizer)

    def _train(self, model: nn.Module, optimizer: Optimizer) -> DeepSpeedPrepared:
        """Start the engine of a trained model."""
        config = engine_config(self.settings, self._run(model, optimizer))
        names = parameter_names({"": model})
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups if group["params"]]
        by_engine = "optimizer" in config
        blocks = self._checkpoint(model)
        prepare_forward(model, self.policy, self.context.device)
        with entering(self.context), ExitStack() as undo:
            undo.callback(_restore, model, blocks)
            engine, *_ = self._deepspeed.initialize(
                model=model,
                optimizer=None if by_engine else optimizer,
                model_parameters=optimizer.param_groups if by_engine else None,
                config=config,
            )
            undo.pop_all()
        if by_engine:  # schedulers and the loop continue to hold the user's object
            share_groups(engine.basic_optimizer, optimizer)
        prepared = DeepSpeedPrepared(
            EngineModel(engine, self._carrier.notice),
            context=self.context,
            ledger=self._ledger,
            gradients=self._carrier.add(engine, names),
            carrier=self._carrier,
            names=names,
            groups=groups,
            scaler=self.scaler,
            checkpointed=blocks,
        )
        kind = PartitionedOptimizer if engine.zero_optimization() else PreparedOptimizer
        prepared.optimizers.append(kind(optimizer, prepared))
        self._ledger.groups = [*self._ledger.groups, prepared.group]
        prepared.group.optimizers = [optimizer]
        self._prepared.append(prepared)
        self.window.fixed_because = _ENGINE_IS_MADE_FOR_IT
        return prepared

    def _checkpoint(self, model: nn.Module) -> list[nn.Module]:
        """Make a model's blocks recompute their activations; return the blocks."""
        kind = self.settings.activation_checkpointing
        if kind == "none":
            return []
        plan = plan_blocks(model, self.settings.blocks, asked="deepspeed.blocks")
        blocks = [model.get_submodule(name) for name in plan.blocks] or [model]
        checkpoint_activations(blocks, kind)
        return blocks

    def _place(self, model: nn.Module) -> TorchPrepared | DeepSpeedPrepared:
        """Prepare an untrained model: partitioned in stage 3, otherwise in full on every rank."""
        prepare_forward(model, self.policy, self.context.device)
        if self.config["zero_optimization"]["stage"] < 3:
            model.to(self.context.device)
            whole = TorchPrepared(model, context=self.context, ledger=self._ledger)
            self._untrained.append(whole)
            self._ledger.groups = [*self._ledger.groups, whole.group]
            return whole
        with entering(self.context), ExitStack() as undo:
            undo.callback(restore_forward, model)
            engine, *_ = self._deepspeed.initialize(
                model=model, config=engine_config(self.settings, self._run(model))
            )
            undo.pop_all()
        partitioned = DeepSpeedPrepared(
            EngineModel(engine, self._carrier.notice),
            context=self.context,
            ledger=self._ledger,
            gradients=None,
            carrier=self._carrier,
            names=parameter_names({"": model}),
            groups=[],
            scaler=None,
        )
        self._untrained.append(partitioned)
        self._ledger.groups = [*self._ledger.groups, partitioned.group]
        return partitioned

    def _trained_by(self, optimizer: Optimizer) -> tuple[DeepSpeedPrepared, PreparedOptimizer]:
        return next(
            (p, o) for p in self._prepared for o in p.optimizers if o is optimizer or o.optimizer is optimizer
        )


def _restore(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Restore a model and its blocks to their own classes."""
    restore_forward(model)
    for block in blocks:
        restore_activations(block)


def _shared_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options that all parameter groups share."""
    first, *others = optimizer.param_groups
    return {
        name: value
        for name, value in first.items()
        if name != "params" and all(group.get(name) == value for group in others)
    }


def _num_elements(model: nn.Module) -> int:
    return sum(map(num_elements, trainable_parameters([model])))
