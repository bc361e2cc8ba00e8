"""A model whose backward is torch's own: what the single and DDP backends have in common."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.accumulation import AccumulationWindow, BackwardRecord, LossNormalizer
from drivetrain_backends.forward import restore_forward
from drivetrain_backends.optimizer import PreparedOptimizer, StepResult, load_named_state, named_state
from drivetrain_backends.pairing import parameter_names
from drivetrain_backends.scheduler import PreparedScheduler
from drivetrain_precision import LossScaler
from drivetrain_state import Context

_OPEN = StepResult(stepped=False, skipped=False)
_STEPPED = StepResult(stepped=True, skipped=False)


class TorchPrepared:
    """One model with its optimizers, trained by torch's autograd on one device or replicated by DDP.

    Args:
        model: What the user calls: the module itself, or its DDP wrapper.
        context: Ranks and device.
        window: The accumulation window shared by the backend's models.
        scaler: The loss scale shared by the backend's models, for fp16.
        record: What the backend's models know together of backward and step.

    Attributes:
        model: What the user calls.
        optimizers: The prepared optimizers that train this model.
        schedulers: The prepared schedulers of those optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: Context,
        window: AccumulationWindow,
        scaler: LossScaler | None,
        record: BackwardRecord,
    ) -> None:
        self.model = model
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.partners: tuple[TorchPrepared, ...] = ()  # models that share an optimizer with this one
        self.normalizer = LossNormalizer(context, window)
        self._context = context
        self._watch = context.watch
        self._window = window
        self._scaler = scaler
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._record = record
        self._finished = 0  # the record's serial when gradients were last unscaled and corrected
        self._stepped_in = -1  # the window of the last step
        self._grad_norm: Tensor | None = None
        # DDP learns a static graph from its first backward, which must therefore reduce (an internal assertion fails
        # otherwise, torch 2.9 to 2.15). Reducing early changes nothing: the mean of equal means is the mean.
        self._learns_graph = isinstance(model, DistributedDataParallel) and model.static_graph

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape (); see `Prepared.backward`."""
        record, scaler = self._record, self._scaler
        loss = self.normalizer.scale(loss, count)
        if scaler is not None:
            if record.scale_may_move(self._window):
                scaler.update()
                record.stepped_window = None
            loss = scaler.scale(loss)
        loss.backward()
        record.note_backward(self._window)
        self._learns_graph = False
        self._grad_norm = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients on their rank; see `Prepared.no_sync`."""
        if isinstance(self.model, DistributedDataParallel) and not self._learns_graph:
            return self.model.no_sync()
        return nullcontext()

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed. Called on all ranks."""
        if not self._window.closing:
            return _OPEN
        self.finish()
        for partner in self.partners:
            partner.finish()
        self._stepped_in = self._record.stepped_window = self._window.number
        self._watch.mark("optimizer step")
        if self._scaler is not None and self._scaler.overflowed():
            return StepResult(stepped=False, skipped=True, grad_norm=self._grad_norm)
        optimizer.step()
        if self._grad_norm is None:
            return _STEPPED
        return StepResult(stepped=True, skipped=False, grad_norm=self._grad_norm)

    def finish(self) -> None:
        """Bring the closed window's gradients to their final value: unscaled, and the mean that was asked for.

        Called on all ranks; a second call in a window does nothing.
        """
        if self._finished == self._record.serial:
            return
        self._finished = self._record.serial
        factor = self.normalizer.correction(self._context.device)
        if factor is None and self._scaler is None:
            return
        factor = 1.0 if factor is None else factor
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scaler is not None:
            self._scaler.unscale(gradients, factor=factor)
        elif gradients:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear one optimizer's gradients, but not those that an open window has gathered so far."""
        window = self._window
        if window.length > 1 or not window.closing:
            record = self._record
            gathered = record.window == window.number and self._stepped_in != window.number
            if gathered and not (window.closing and record.micro_batch == window.begun):
                return
        if self._finished != self._record.serial:  # gradients that were never used: forget their losses too
            self._finished = self._record.serial
            self.normalizer.discard()
        optimizer.zero_grad(set_to_none)

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip by norm or by value once the window is closed; see `Prepared.clip`."""
        if (norm is None) == (value is None):
            raise ValueError(f"clip(norm={norm!r}, value={value!r}): give one of the two")
        if not self._window.closing:
            return None
        self.finish()
        chosen = self._parameters if parameters is None else list(parameters)
        if value is not None:
            nn.utils.clip_grad_value_(chosen, value)
            return None
        assert norm is not None
        self._grad_norm = nn.utils.clip_grad_norm_(chosen, norm, norm_type=norm_type)
        return self._grad_norm

    def unwrap(self) -> nn.Module:
        """The user's module, without DDP's wrapper; it goes on computing in the run's precision."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def release(self) -> nn.Module:
        """Undo the preparation: the user's module with its own class."""
        return restore_forward(self.unwrap())

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizers and schedulers; see `Prepared.state_dict`."""
        names = self._names()
        return {
            "model": self.unwrap().state_dict(),
            "optimizers": [named_state(o.optimizer, names) for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "num_steps": [o.num_steps for o in self.optimizers],
            "scheduler_lags": [s.lag for s in self.schedulers],
            "reference_count": self.normalizer.reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; see `Prepared.load_state_dict`.

        Raises:
            ValueError: The checkpoint holds another number of optimizers or schedulers, or other parameters.
        """
        for kind, own in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            if len(state[kind]) != len(own):
                raise ValueError(
                    f"the checkpoint holds {len(state[kind])} {kind} for {type(self.unwrap()).__name__}, and "
                    f"{len(own)} are prepared; prepare the same ones before load_state()"
                )
        names = self._names()
        self.unwrap().load_state_dict(state["model"])
        for optimizer, saved, steps in zip(
            self.optimizers, state["optimizers"], state["num_steps"], strict=True
        ):
            load_named_state(optimizer.optimizer, names, saved)
            optimizer.num_steps = steps
        for scheduler, saved, lag in zip(
            self.schedulers, state["schedulers"], state["scheduler_lags"], strict=True
        ):
            scheduler.load_state_dict(saved)
            scheduler.catch_up(lag)
        reference = state["reference_count"]
        self.normalizer.reference = (
            reference.to(self._context.device) if isinstance(reference, Tensor) else reference
        )

    def _names(self) -> dict[Tensor, str]:
        sharing = (self, *self.partners)
        return parameter_names({str(i): prepared.unwrap() for i, prepared in enumerate(sharing)})
