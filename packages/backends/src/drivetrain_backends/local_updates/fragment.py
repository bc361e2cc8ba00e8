"""A part of a model's weights that replicas exchange together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.state_dict.dtensor import local

OuterOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Fragment:
    """Some trained weights of a replica, which all replicas exchange.

    Without an outer optimizer, the replicas' weights become their mean. With one, each rank also keeps outer weights,
    the same on all replicas, in fp32 or wider: the optimizer steps on the mean distance of the replicas' weights from
    them as on a gradient, and the replicas' weights become the outer ones.

    Attributes:
        names: The names of the weights.
        outer: The outer weights, in the same order; none without an outer optimizer.
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
        self._weights = [local(parameter.detach()) for _, parameter in weights]
        self._buffers, self._group = buffers, group
        self.outer = [] if make_optimizer is None else [nn.Parameter(_wide(one)) for one in self._weights]
        self._optimizer = None if make_optimizer is None else make_optimizer(self.outer)
        self._sent: tuple[Tensor, dist.Work | None] | None = None
        self.sent_bytes = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to average weights, or their distances from the outer ones. Called on all ranks."""
        sent = [*self._weights, *self._buffers]
        dtype = torch.promote_types(
            max((one.dtype for one in sent), key=lambda one: one.itemsize), torch.float32
        )
        flat = torch.empty(sum(one.numel() for one in sent), dtype=dtype, device=sent[0].device)
        parts = flat.split([one.numel() for one in sent])
        for one, part in zip(sent, parts, strict=True):
            part.copy_(one.reshape(-1))
        for outer, part in zip(self.outer, parts, strict=False):
            torch.sub(outer.reshape(-1), part, out=part)
        alone = self._group is None or not flat.numel()  # of shards, this rank may have none
        self._sent = flat, None if alone else dist.all_reduce(flat, group=self._group, async_op=True)
        self.sent_bytes += 0 if alone else flat.nbytes

    @torch.no_grad()
    def end(self, *, local_share: float = 0.0) -> None:
        """Wait for the mean, and move the replicas' weights, which keep a share of their own."""
        if self._sent is None:
            return
        (flat, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
            flat /= dist.get_world_size(self._group)
        received = [*self._weights, *self._buffers]
        parts = flat.split([one.numel() for one in received])
        means = [part.view_as(one) for part, one in zip(parts, received, strict=True)]
        if self._optimizer is not None:
            for outer, mean in zip(self.outer, means, strict=False):
                outer.grad = mean
            self._optimizer.step()
            self._optimizer.zero_grad()
            means[: len(self.outer)] = self.outer
        for one, mean in zip(received, means, strict=True):
            one.copy_(torch.lerp(mean, one.to(mean.dtype), local_share) if local_share else mean)

    def drop(self) -> None:
        """Forget an exchange that is under way. Called on all ranks."""
        if self._sent is not None and self._sent[1] is not None:
            self._sent[1].wait()
        self._sent = None

    @torch.no_grad()
    def renew(self) -> None:
        """Take the weights as they are for the outer ones, as after loading."""
        self.drop()
        for outer, weight in zip(self.outer, self._weights, strict=False):
            outer.copy_(weight)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the outer optimizer's states by the name of the weight."""
        if self._optimizer is None:
            return {}
        held = self._optimizer.state
        return {
            name: dict(held[outer])
            for name, outer in zip(self.names, self.outer, strict=True)
            if outer in held
        }

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `states` returned, of these weights or of more."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, outer in zip(self.names, self.outer, strict=True):
            for key, value in states.get(name, {}).items():
                is_tensor = isinstance(value, Tensor) and value.ndim
                self._optimizer.state[outer][key] = value.to(outer.device, copy=True) if is_tensor else value


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy in fp32 or wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
