"""A part of a model's weights that replicas exchange together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.state_dict.dtensor import local

OuterOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Fragment:
    """Some trained weights of a replica, and the outer weights that all replicas have alike.

    The outer weights are kept in fp32 or wider. An exchange averages the distance of the replicas' weights from them;
    the outer optimizer steps on that mean as on a gradient, and the replicas' weights become the outer ones.

    Attributes:
        names: The names of the weights.
        outer: The outer weights, in the same order.
        sent_bytes: The bytes of all exchanges so far, of the sum as a whole.
    """

    def __init__(
        self,
        weights: Sequence[tuple[str, nn.Parameter]],
        buffers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        make_optimizer: OuterOptimizer | None,
    ) -> None:
        self.names = [name for name, _ in weights]
        self._weights = [parameter for _, parameter in weights]
        self._buffers, self._group = buffers, group
        self.outer = [nn.Parameter(_wide(local(weight))) for weight in self._weights]
        self._optimizer = None if make_optimizer is None else make_optimizer(self.outer)
        self._sent: tuple[Tensor, dist.Work | None] | None = None
        self.sent_bytes = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to average the distances. Called on all ranks."""
        moved = [outer - local(weight) for outer, weight in zip(self.outer, self._weights, strict=True)]
        flat = torch.cat([one.reshape(-1) for one in (*moved, *map(_wide, self._buffers))])
        alone = self._group is None
        self._sent = flat, None if alone else dist.all_reduce(flat, group=self._group, async_op=True)
        self.sent_bytes += 0 if alone else flat.nbytes

    @torch.no_grad()
    def end(self, *, local_share: float = 0.0) -> None:
        """Wait for the mean distance, and step the outer weights; replicas keep a share of their own."""
        if self._sent is None:
            return
        (flat, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
            flat /= dist.get_world_size(self._group)
        *moved, buffers = flat.split([*(one.numel() for one in self.outer), sum(one.numel() for one in self._buffers)])
        for outer, mean in zip(self.outer, moved, strict=True):
            outer.grad = mean.view_as(outer)
            if self._optimizer is None:
                outer.sub_(outer.grad)
        if self._optimizer is not None:
            self._optimizer.step()
        for outer, weight in zip(self.outer, self._weights, strict=True):
            outer.grad = None
            held = local(weight)
            held.copy_(torch.lerp(outer, held.to(outer.dtype), local_share) if local_share else outer)
        for buffer, mean in zip(self._buffers, buffers.split([one.numel() for one in self._buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def drop(self) -> None:
        """Forget an exchange that is under way. Called on all ranks."""
        if self._sent is not None and self._sent[1] is not None:
            self._sent[1].wait()
        self._sent = None

    @torch.no_grad()
    def renew(self) -> None:
        """Take the weights as they are for the outer ones, as after loading."""
        self.drop()
        for outer, weight in zip(self.outer, self._weights, strict=True):
            outer.copy_(local(weight))

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the outer optimizer's states by the name of the weight."""
        held = {} if self._optimizer is None else self._optimizer.state
        return {name: dict(held[outer]) for name, outer in zip(self.names, self.outer, strict=True) if outer in held}

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        """Load what `states` returned, of these weights or of more."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, outer in zip(self.names, self.outer, strict=True):
            if name in states:
                self._optimizer.state[outer] = {
                    key: value.to(outer.device, copy=True) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in states[name].items()
                }


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy in fp32 or wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
