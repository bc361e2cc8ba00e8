"""One harness for "this case, on these ranks, equals the plain loop".

A test that is marked `ranks` builds a backend or an Accelerator and calls `assert_equals_plain_loop(case, backend)`.
Each rank trains the case through the backend, trains it once more by a plain loop over the micro-batches of all
ranks, and compares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from drivetrain_backends import Backend, Prepared
from plain_loop.backends import held, weights

Weights = dict[str, Tensor]
Backward = Callable[[Tensor], object]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train one model with one optimizer, or several with several.

    Attributes:
        build: Return the model, or a list of models; equal weights at each call.
        loss: Return the loss of a model (or of the list) for a rank's micro-batch of a number, or a list of losses.
        micro_batch: In place of `loss`: call the given backward with each loss of a model, rank and number.
        optimizer: Return the optimizer of a model's parameters (or those of a list of models).
        steps: The number of optimizer steps.
        accumulation: The number of micro-batches of a step on each rank.
        count: The number of items of each loss, which is a sum then; None for losses that are means.
        clip: The arguments to clip with, `norm`, `norm_type` or `value`; None for no clipping.
        before_step: Called with a model and the number of the step, in both loops.
        after_step: The same, after the step.
        clears_in_turn: Whether each optimizer clears gradients right after its step, in the backend's loop.
        before_clip: Called between the last backward and the step, in the backend's loop alone.
    """

    build: Callable[[], Any]
    loss: Callable[[Any, int, int], Any] | None = None
    micro_batch: Callable[[Any, int, int, Backward], object] | None = None
    optimizer: Callable[[Any], Any] = sgd
    steps: int = 3
    accumulation: int = 1
    count: int | None = None
    clip: Mapping[str, float] | None = None
    before_step: Callable[[Any, int], object] = lambda model, step: None
    after_step: Callable[[Any, int], object] = lambda model, step: None
    clears_in_turn: bool = False
    before_clip: Callable[[Any], object] = lambda model: None

    def run(self, model: Any, rank: int, number: int, backward: Backward) -> None:
        """Call `backward` with each loss of a micro-batch."""
        if self.micro_batch is not None:
            self.micro_batch(model, rank, number, backward)
        else:
            assert self.loss is not None
            for loss in _listed(self.loss(model, rank, number)):
                backward(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The results of a run: the full weights of each model, the losses of this rank, and the norms of each step."""

    weights: list[Weights]
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_plain(case: Case, num_ranks: int) -> Trained:
    """Train on the micro-batches of all ranks in one process, with torch alone; return the losses of this rank."""
    built = case.build()
    models, optimizers = _listed(built), _optimizers(case, built)
    found, rank, rank_now = Trained(weights=[]), own_rank(), 0
    items = num_ranks * case.accumulation * (case.count or 1)

    def backward(loss: Tensor) -> None:
        if rank_now == rank:
            found.losses.append(loss.item())
        (loss / items).backward()

    for step in range(case.steps):
        case.before_step(built, step)
        for number in range(step * case.accumulation, (step + 1) * case.accumulation):
            for rank_now in range(num_ranks):
                case.run(built, rank_now, number, backward)
        if case.clip is not None:
            _clip_plainly([p for model in models for p in model.parameters()], case.clip, found.norms)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        case.after_step(built, step)
    found.weights.extend({name: v.detach() for name, v in model.state_dict().items()} for model in models)
    return found


def run_on_ranks(case: Case, backend: Any) -> Trained:
    """Train this rank's micro-batches through a backend whose window has the case's length. Called on all ranks."""
    built = case.build()
    prepared = backend.prepare(_listed(built), _optimizers(case, built), [])
    return train(case, backend, prepared)


def train(case: Case, backend: Backend, prepared: Sequence[Prepared]) -> Trained:
    """Train what is prepared already. Called on all ranks."""
    found, rank = Trained(weights=[]), own_rank()
    is_one = len(prepared) == 1
    user = prepared[0].unwrap() if is_one else [one.unwrap() for one in prepared]
    model = prepared[0].model if is_one else [one.model for one in prepared]
    trained = prepared[0] if is_one else backend

    def backward(loss: Tensor) -> None:
        found.losses.append(loss.item())
        trained.backward(loss, count=case.count)

    optimizers = [optimizer for one in prepared for optimizer in one.optimizers]
    for step in range(case.steps):
        case.before_step(user, step)
        for number in range(step * case.accumulation, (step + 1) * case.accumulation):
            backend.window.begin()
            with held(backend, prepared):
                case.run(model, rank, number, backward)
            if backend.window.closing:
                case.before_clip(model)
            if case.clip is not None and (norm := prepared[0].clip(**case.clip)) is not None:
                found.norms.append(norm.item())
            for optimizer in optimizers:
                optimizer.step()
                if case.clears_in_turn:
                    optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.zero_grad()
        case.after_step(user, step)
    found.weights.extend(weights(one) for one in prepared)
    return found


def assert_equals_plain_loop(case: Case, backend: Any, **tolerance: float) -> Trained:
    """Compare a case under a backend with the plain loop: weights, losses and norms. Called on all ranks."""
    number = dist.get_world_size() if dist.is_initialized() else 1
    expected, found = run_plain(case, number), run_on_ranks(case, backend)
    backend.close()
    assert_equal(found, expected, **tolerance)
    return found


def assert_equal(found: Trained, expected: Trained, **tolerance: float) -> None:
    """Compare two runs; `tolerance` is torch's `rtol` and `atol`."""
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.losses, expected.losses, **tolerance)
    for own, plain in zip(found.weights, expected.weights, strict=True):
        assert own.keys() == plain.keys()
        torch.testing.assert_close(own, dict(plain), **tolerance)
    torch.testing.assert_close(found.norms, expected.norms, **tolerance)


def assert_same_on_all_ranks(value: Any) -> None:
    """Compare a value of this rank with those of the others. Called on all ranks."""
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, value)
    for other in others:
        torch.testing.assert_close(other, value, rtol=0.0, atol=0.0)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _optimizers(case: Case, built: Any) -> list[Optimizer]:
    return _listed(case.optimizer(built if isinstance(built, list) else built.parameters()))


def _clip_plainly(parameters: list[nn.Parameter], clip: Mapping[str, float], norms: list[float]) -> None:
    if "value" in clip:
        nn.utils.clip_grad_value_(parameters, clip["value"])
        return
    filled = [p for p in parameters if p.numel()]  # torch's norm has no largest element of nothing
    norm = nn.utils.clip_grad_norm_(filled, clip["norm"], norm_type=clip.get("norm_type", 2.0))
    norms.append(norm.item())
