"""The backend around torch's own autograd: pairing and bookkeeping; how a model is wrapped is left open."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.engine import GradientCarrier, ParameterGradients
from drivetrain_backends.gradients.groups import group_models
from drivetrain_backends.gradients.tracker import GradientGroup, GradientLedger
from drivetrain_backends.modules.autocast_forward import PreparedForward, prepare_forward, restore_forward
from drivetrain_backends.modules.compile import uncompiled
from drivetrain_backends.modules.meta_check import check_values
from drivetrain_backends.modules.module_proxy import StandIn
from drivetrain_backends.optim.optimizer import PreparedOptimizer
from drivetrain_backends.optim.parameter_matching import owners
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_precision import LossScaler, Policy
from drivetrain_state import Context


class TorchBackend:
    """What `SingleBackend` and `DDPBackend` share; `wrap` is what they differ in.

    Args:
        context: Ranks and device.
        policy: The precision that models compute in.
        window: The accumulation window; the caller begins its micro-batches.
        settings: The backend's own section.
    """

    settings_section: ClassVar[str | None] = None
    settings_type: ClassVar[type[Any] | None] = None
    needs_group: ClassVar[bool] = False

    def __init__(
        self,
        context: Context,
        policy: Policy,
        *,
        window: AccumulationWindow,
        settings: Any = None,
    ) -> None:
        self.context = context
        self.policy = policy
        self.window = window
        self.settings = (
            settings if settings is not None or self.settings_type is None else self.settings_type()
        )
        self.scaler = None if policy.scaling is None else LossScaler(context.device, policy.scaling)
        self._prepared: list[TorchPrepared] = []
        self._ledger = GradientLedger(context, window, self.scaler, self.carrier())
        self._trained: list[GradientGroup] = []  # those with an optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        """Turn a model that is on its device and under autocast into what the user calls."""
        return model

    def make_prepared(self, model: nn.Module) -> TorchPrepared:
        """Make what steps a wrapped model."""
        return TorchPrepared(model, context=self.context, ledger=self._ledger)

    def check_placeable(self, model: nn.Module) -> None:
        """Refuse a model that could not be placed, while none is changed.

        Raises:
            ValueError: It could not.
        """
        check_values(model)

    def take_back(self, placed: Sequence[TorchPrepared], error: BaseException) -> None:
        """Give models their own classes back, after a `prepare` that failed.

        Args:
            placed: Those that it had placed.
            error: What it failed with; what cannot be undone is said there.
        """
        del error
        for prepared in placed:
            prepared.release()

    def carrier(self) -> GradientCarrier:
        """What runs backwards and holds their gradients."""
        return ParameterGradients(self.scaler)

    def bring_along(self, optimizer: Optimizer) -> None:
        """Fit an optimizer to its placed models: state that was loaded before moves to where parameters are now."""
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    def building(self) -> AbstractContextManager[Any]:
        """Inside, parameters are made on the backend's device at once."""
        return self.context.device

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[TorchPrepared, ...]:
        """Prepare models with their optimizers and schedulers; see `Backend.prepare`. Called on all ranks.

        Raises:
            ValueError: A model is prepared already, or cannot be placed. Models are as they were, on the device.
        """
        plain = [*(p.unwrap() for p in self._prepared), *models]
        pairs = [(optimizer, owners(optimizer, plain)) for optimizer in optimizers]
        known = [
            *optimizers,
            *(one for p in self._prepared for o in p.optimizers for one in (o, o.optimizer)),
        ]
        check_new(models)
        for model in models:
            self.check_placeable(model)
        check_schedulers(schedulers, known)
        before = [(prepared, len(prepared.optimizers)) for prepared in self._prepared]
        try:
            for model in models:
                self._prepared.append(self._place(model))
            touched: list[TorchPrepared] = self._prepared[len(before) :]
            for optimizer, indices in pairs:
                first = self._prepared[indices[0]]
                self.bring_along(optimizer)
                first.optimizers.append(PreparedOptimizer(optimizer, first))
                touched.append(first)
            self._regroup()
        except BaseException as error:
            placed, self._prepared = self._prepared[len(before) :], [prepared for prepared, _ in before]
            for prepared, number in before:
                del prepared.optimizers[number:]
            self.take_back(placed, error)
            raise
        for scheduler in schedulers:
            prepared, optimizer = self._trained_by(scheduler.optimizer)
            prepared.schedulers.append(PreparedScheduler(scheduler, optimizer))
            touched.append(prepared)
        return tuple(dict.fromkeys(touched))

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of a loss that may flow through any of the prepared models; see `Backend.backward`."""
        if not self._prepared:
            raise AccumulationError(
                "backward() before prepare(model): there is no model to reduce gradients for"
            )
        owners = self._trained or self._ledger.groups
        if len(owners) > 1 and count is not None:
            raise AccumulationError(
                f"backward(count=...) with {len(owners)} models that have optimizers of their own: say with model= "
                "whose items are counted; model=(a, b) where the loss trains both"
            )
        self._ledger.backward(loss, count, owners)

    def backward_of(
        self, models: Sequence[Any], loss: Tensor, *, count: Tensor | float | None = None
    ) -> None:
        """Add the gradients of a loss that trains several models; see `Backend.backward_of`."""
        chosen = [one.group for one in self._prepared if any(one is prepared for prepared in models)]
        self._ledger.backward(loss, count, list(dict.fromkeys(chosen)))

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Nothing to do on one device; see `Backend.join`."""
        del models
        return nullcontext()

    def applied(self) -> Mapping[str, object]:
        """What is in force, read back from the prepared models."""
        return {
            "device": str(self.context.device),
            "gradient_accumulation_steps": self.window.next_num_micro_batches,
            "mixed_precision": self.policy.mode,
            "loss_scaling": self.scaler is not None,
            "nonfinite_gradients": self.window.nonfinite_gradients,
        }

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one, and the reference of counted losses."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the loss scale of a saved run.

        Raises:
            ValueError: The saved run scaled its loss and this one does not, or the reverse.
        """
        self._ledger.load_state_dict(state)

    def close(self) -> None:
        """Give every model its own class back and forget them all."""
        for prepared in self._prepared:
            prepared.release()
            for optimizer in prepared.optimizers:
                optimizer.release()
        self._prepared, self._trained, self._ledger.groups = [], [], []
        self.window.reset()
        self._ledger.unreduced.clear()

    def _place(self, model: nn.Module) -> TorchPrepared:
        model.to(self.context.device)
        prepare_forward(model, self.policy, self.context.device)
        try:
            wrapped = self.wrap(model)
        except BaseException:
            restore_forward(model)
            raise
        return self.make_prepared(wrapped)

    def _regroup(self) -> None:
        """Bring models that share an optimizer or a parameter together."""
        models = [prepared.unwrap() for prepared in self._prepared]
        optimizers = [o.optimizer for prepared in self._prepared for o in prepared.optimizers]
        groups = group_models(models, [owners(optimizer, models) for optimizer in optimizers], self._ledger)
        for prepared, group in zip(self._prepared, groups, strict=True):
            prepared.group = group
        for group in self._ledger.groups:
            group.optimizers = [o.optimizer for p in self._prepared if p.group is group for o in p.optimizers]
        self._trained = [group for group in self._ledger.groups if group.optimizers]
        self._ledger.first_losses.renew()

    def _trained_by(self, optimizer: Optimizer) -> tuple[TorchPrepared, PreparedOptimizer]:
        return next(
            (p, o) for p in self._prepared for o in p.optimizers if o is optimizer or o.optimizer is optimizer
        )


def check_new(models: Sequence[nn.Module]) -> None:
    """Refuse models that are prepared already.

    Raises:
        ValueError: One is.
    """
    for model in models:
        inner = uncompiled(model)
        wrapped = inner.module if isinstance(inner, StandIn) else inner
        if inner is not wrapped or isinstance(model, PreparedForward) or isinstance(inner, PreparedForward):
            raise ValueError(
                f"{type(wrapped).__name__} is prepared already; prepare() a model once, or free_memory() and "
                "prepare() the module that you built"
            )


def check_schedulers(schedulers: Sequence[Scheduler], optimizers: Sequence[object]) -> None:
    """Refuse schedulers whose optimizer is none of those that are prepared.

    Raises:
        PairingError: One is of another optimizer.
    """
    for scheduler in schedulers:
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise PairingError(
                f"{type(scheduler).__name__}: its optimizer is not prepared; pass the optimizer to the same "
                "prepare() call, or prepare it first"
            )
