"""A model whose backward is torch's own: what the single and DDP backends have in common."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.forward import restore_forward
from drivetrain_backends.gradients import GradientGroup, GradientLedger
from drivetrain_backends.optimizer import PreparedOptimizer, StepResult, load_named_state, named_state
from drivetrain_backends.pairing import parameter_names
from drivetrain_backends.scheduler import PreparedScheduler
from drivetrain_state import Context

_OPEN = StepResult(stepped=False, skipped=False)
_STEPPED = StepResult(stepped=True, skipped=False)


class TorchPrepared:
    """One model with its optimizers, trained by torch's autograd on one device or replicated by DDP.

    Args:
        model: What the user calls: the module itself, or its DDP wrapper.
        context: Ranks and device.
        ledger: What the backend's models know together of their gradients.

    Attributes:
        model: What the user calls.
        optimizers: The prepared optimizers that train this model.
        schedulers: The prepared schedulers of those optimizers.
        group: The gradients of this model, and of those that share an optimizer or a parameter with it.
    """

    def __init__(self, model: nn.Module, *, context: Context, ledger: GradientLedger) -> None:
        self.model = model
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.group = GradientGroup([self.unwrap()], ledger)
        self._context = context
        self._watch = context.watch
        self._ledger = ledger
        self._window = ledger.window
        self._prepared_at = ledger.num_backwards

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape (); see `Prepared.backward`."""
        self._ledger.backward(loss, count, (self.group,))

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients on their rank; see `Prepared.no_sync`."""
        if not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        # DDP learns a static graph from its first backward, which must therefore reduce (an internal assertion fails
        # otherwise, torch 2.9 to 2.15). Reducing early changes nothing: the mean of equal means is the mean.
        if self.model.static_graph and self._ledger.num_backwards == self._prepared_at:
            return nullcontext()
        return self.model.no_sync()

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed. Called on all ranks."""
        if not self._window.closing:
            return _OPEN
        group = self.group
        if self._ledger.unreduced:
            self._ledger.check_reduced(optimizer)
        group.finish()
        group.use()
        self._watch.mark("optimizer step")
        if group.overflowed:
            return StepResult(stepped=False, skipped=True, grad_norm=group.grad_norm)
        optimizer.step()
        if group.grad_norm is None:
            return _STEPPED
        return StepResult(stepped=True, skipped=False, grad_norm=group.grad_norm)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear one optimizer's gradients, but not those that an open window has gathered so far."""
        window, group = self._window, self.group
        gathered = group.stage == "open" and group.opened_in == window.number
        # Many loops zero before backward: what earlier micro-batches of the window gathered must stay then.
        closes = window.closing and (window.length == 1 or self._ledger.last_backward == window.begun)
        if gathered and not closes:
            return
        optimizer.zero_grad(set_to_none)
        group.cleared_by(optimizer)

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
        chosen = list(self.model.parameters() if parameters is None else parameters)
        groups = self._ledger.finish_all_of(chosen)
        if value is not None:
            nn.utils.clip_grad_value_(chosen, value)
            return None
        assert norm is not None
        total = nn.utils.clip_grad_norm_(chosen, norm, norm_type=norm_type)
        for group in groups:
            group.grad_norm = total
        return total

    def unwrap(self) -> nn.Module:
        """The user's module, without DDP's wrapper; it goes on computing in the run's precision."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @contextmanager
    def gathered(self, *, write: bool = False) -> Generator[None]:
        """Inside, the parameters are whole, as they always are here; see `Prepared.gathered`."""
        yield
        if write and self._context.group is not None:
            for parameter in self.unwrap().parameters():
                dist.broadcast(parameter.detach(), src=0)

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
        self._load_model(state["model"])
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

    def _load_model(self, state: Mapping[str, Any]) -> None:
        self.unwrap().load_state_dict(state)

    def _names(self) -> dict[Tensor, str]:
        return parameter_names({str(i): model for i, model in enumerate(self.group.models)})
