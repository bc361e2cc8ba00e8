"""A user's loop over the windows of a contract case, through a backend."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from drivetrain_backends.modules.activation_checkpointing import checkpointing_of
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_backends.optim.optimizer import PreparedOptimizer
from drivetrain_backends.protocol import Backend, Prepared
from drivetrain_backends.state_dict.full_tensors import full_state_dict
from drivetrain_backends.testing.reference_training import Case, TinyModel, Window, loss_and_count
from drivetrain_precision.compat import compiled_part
from drivetrain_state import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run of a prepared model over the windows of a case."""

    context: Context
    case: Case
    backend: Backend
    prepared: Prepared
    model: TinyModel
    changes: BlockChanges
    windows: list[Window]
    losses: list[Tensor] = field(default_factory=list[Tensor])  # of the present window
    norms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def optimizer(self) -> PreparedOptimizer:
        """The model's only optimizer."""
        return self.prepared.optimizers[0]

    def steps(self, *, skip: int = 0) -> Iterator[None]:
        """Train like a user's loop, yielding after every window."""
        for window in self.windows[skip:]:
            for i, by_rank in enumerate(window):
                self.backend.window.begin(is_last=i + 1 == len(window))
                self._micro_batch(*by_rank[self.context.ranks("reads").index])
            yield
            self.losses.clear()

    def is_changed(self) -> bool:
        """Return whether the model's first layer is recomputed and compiled as the case asks."""
        asked, layer = self.case.changes, self.model.first
        is_compiled = compiled_part(layer) is not None
        return checkpointing_of(layer) == asked.activation_checkpointing and is_compiled == (
            asked.compile != "none"
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the model's full weights."""
        return whole_weights(self.prepared)

    def _micro_batch(self, x: Tensor, y: Tensor) -> None:
        x, y = x.to(self.context.device), y.to(self.context.device)
        if self.case.zero_first:
            self.optimizer.zero_grad()
        with held(self.backend, self.prepared):
            loss, count = loss_and_count(self.case, self.prepared.model(x), y)
            self.prepared.backward(loss, count=count)
        self.losses.append(loss.detach().cpu())
        if self.case.clip is not None and (norm := self.prepared.clip(norm=self.case.clip)) is not None:
            self.norms["norm"] = norm.cpu()
        self.optimizer.step()
        for scheduler in self.prepared.schedulers:
            scheduler.step()
        if not self.case.zero_first:
            self.optimizer.zero_grad()


def whole_weights(prepared: Prepared) -> dict[str, Tensor]:
    """Return a prepared model's full weights, on the CPU. Called on all ranks."""
    state = full_state_dict(prepared.state_dict()["model"])
    tensors = {
        name: value for name, value in state.items() if isinstance(value, Tensor)
    }  # no `get_extra_state`
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


def clip_and_step(prepared: Prepared, case: Case) -> None:
    """Clip, step and clear gradients like a user's loop, for a model with one optimizer."""
    if case.clip is not None:
        prepared.clip(norm=case.clip)
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()


def held(backend: Backend, prepared: Prepared) -> AbstractContextManager[None]:
    """Return the context of a micro-batch: gradients stay local unless it closes its window."""
    return nullcontext() if backend.window.closing else prepared.no_sync()
