"""A model whose stages threads hold, compared with the whole one: its loss, and every gradient."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_parallel.stages.runner import StageRunner
from drivetrain_parallel.stages.schedules import SCHEDULES
from drivetrain_parallel.stages.stage_model import keep_stages
from drivetrain_parallel.stages.stage_plan import plan_stages
from parallel.divided import ThreadRanks, assert_near, on_threads


@dataclass
class QueueLinks:
    """Links between threads; each has the queues of all."""

    queues: dict[tuple[int, int, int], SimpleQueue[Tensor]] = field(
        default_factory=dict[tuple[int, int, int], SimpleQueue[Tensor]]
    )
    has_failed: Event = field(default_factory=Event)  # a thread, for which others need not wait

    def send(self, tensor: Tensor, *, to: int, stage: int, tag: int) -> Callable[[], object]:
        self.queues.setdefault((stage, to, tag), SimpleQueue()).put(tensor.detach().clone())
        return lambda: None

    def receive(self, like: Tensor, *, source: int, stage: int, tag: int) -> Tensor:
        queue = self.queues.setdefault((source, stage, tag), SimpleQueue())
        while queue.empty():
            assert not self.has_failed.wait(0.001), "another thread failed"
        found = queue.get()
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        return found


def assert_staged(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    num_ranks: int = 2,
    schedule: str = "1f1b",
    tolerance: float = 1e-9,
    **plan: Any,
) -> None:
    """Assert that stages on threads have the loss and the gradients of the whole model, for batches of any shapes."""
    kind, links = SCHEDULES[schedule], QueueLinks()
    whole = deepcopy(model)
    expected = sum(loss(whole, batch) for batch in batches)
    assert isinstance(expected, Tensor)
    expected.backward()
    planned = plan_stages(model, kind.ranks(num_ranks), **plan)

    def work(ranks: ThreadRanks) -> tuple[float, dict[str, Tensor | None]]:
        own = deepcopy(model)
        stages = keep_stages(own, planned, ranks.rank, device=torch.device("cpu"))
        losses: list[float] = []

        def root(piece: int, found: Tensor) -> Tensor:
            losses.append(found.item())
            return found

        def backward(output: Tensor, gradient: Tensor | None, *, is_last: bool) -> None:
            output.backward(gradient)

        runner = StageRunner(stages, kind, links, num_ranks)
        try:
            runner.train([lambda batch=batch: loss(own, batch) for batch in batches], root, backward)
        except Exception:
            links.has_failed.set()
            raise
        return sum(losses), {name: p.grad for name, p in own.named_parameters(remove_duplicate=False)}

    found = on_threads(num_ranks, work)
    assert_near(
        "the loss", torch.tensor(sum(one for one, _ in found)), expected.float(), max(tolerance, 1e-6)
    )
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        held = [gradients[name] for _, gradients in found if gradients.get(name) is not None]
        assert all(name in found[rank][1] for rank in planned.holders[name])
        total = sum(one for one in held if one is not None) if held else None
        if parameter.grad is None:
            assert total is None or not total.any()
        else:
            assert isinstance(total, Tensor), name
            assert_near(f"the gradient of {name}", total, parameter.grad, tolerance)
