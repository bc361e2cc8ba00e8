"""Optimizers that keep state elsewhere than with their parameters, and whose steps depend on it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer


class Hooked(SGD):
    """Divides its rate by a count that it keeps through torch's hooks."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.seen = 0
        self.register_state_dict_post_hook(lambda _, state: {**state, "seen": self.seen})
        self.register_load_state_dict_pre_hook(lambda _, state: setattr(self, "seen", state["seen"]))

    def step(self, closure: Any = None) -> None:
        self.seen += 1
        self.param_groups[0]["lr"] = 0.1 / self.seen
        super().step(closure)


class Own(SGD):
    """The same through a `state_dict` of its own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.seen = 0

    def step(self, closure: Any = None) -> None:
        self.seen += 1
        self.param_groups[0]["lr"] = 0.1 / self.seen
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.seen = rest.pop("seen")
        super().load_state_dict(rest)


class Keyed(SGD):
    """The same under a string in `state`, made at the first step, as in MADGRAD."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> None:
        seen = self.state.setdefault("k", torch.zeros(1, dtype=torch.long))
        seen += 1
        self.param_groups[0]["lr"] = 0.1 / seen.item()
        super().step(closure)


class Lookahead(Optimizer):
    """Every second step pulls the weights half-way back to slow ones; holds another optimizer's state."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.base = AdamW(params, lr=0.1)
        super().__init__(self.base.param_groups[0]["params"], {})
        self.param_groups = self.base.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        for slow, saved in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(saved)
        self.count = state_dict["count"]


class Chained(Optimizer):
    """One optimizer for matrices and one for the rest, each with its state."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        listed = list(params)
        self.parts = [
            SGD([p for p in listed if p.dim() > 1], lr=0.1, momentum=0.9),
            AdamW([p for p in listed if p.dim() < 2], lr=0.1),
        ]
        super().__init__(listed, {})
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self._join()
