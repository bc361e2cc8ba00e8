"""An average of a model's weights over its steps, of which each rank keeps what it holds of the model.

With a decay, it is an exponential moving average; without one, the mean of all updates, which is stochastic weight
averaging (Izmailov et al., 2018).
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drivetrain_backends.modules.compile import strip_wrapper_prefix
from drivetrain_backends.protocol import Prepared, SupportsWeights
from drivetrain_backends.state_dict.elements import own_elements, with_elements


class WeightAverage:
    """The average of a prepared model's weights, brought up to date after the steps of its last optimizer.

    Trained parameters are averaged in fp32 or wider, and so are buffers in floating point, such as a batch norm's
    statistics. The rest of the model's state stays its own: parameters that are frozen when this is made, and counts.
    A step that was skipped for a gradient that is not finite changes nothing. Made on all ranks.

    Args:
        prepared: The prepared model.
        decay: The share of the average that stays at each step, between 0 and 1; None for the mean of all updates.
        warmup: The steps over which the decay rises: at step n it is at most (1 + n) / (warmup + n). 0 for none.
        every: The steps between two updates; the average keeps `decay ** every` at each.
        start: The steps before the average begins; until then it is the model itself.

    Attributes:
        num_steps: The number of steps seen.
        num_updates: The number of updates of the average.
        is_applied: Whether the model holds the averaged weights.

    Raises:
        ValueError: A number is out of range, or the backend does not give its weights.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        decay: float | None = 0.999,
        warmup: int = 0,
        every: int = 1,
        start: int = 0,
    ) -> None:
        if not isinstance(prepared, SupportsWeights):
            raise ValueError(
                f"an average of {type(prepared.unwrap()).__name__}: {type(prepared).__name__} has no weights() and "
                "load_weights(), by which a backend gives them"
            )
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r}: at least 0 and below 1, such as 0.999; None for the mean")
        for name, value, least in (("warmup", warmup, 0), ("every", every, 1), ("start", start, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of {least} or more")
        if warmup and decay is None:
            raise ValueError(f"warmup={warmup} without a decay: the mean has none; leave it out")
        self.decay, self.warmup, self.every, self.start = decay, warmup, every, start
        self.num_steps = self.num_updates = 0
        self.is_applied = False
        self._prepared = prepared
        parameters = prepared.unwrap().named_parameters(remove_duplicate=False)
        self._frozen = {strip_wrapper_prefix(name) for name, p in parameters if not p.requires_grad}
        self._current: list[Tensor] = []  # of the model, where reading it again gives the same tensors
        self._average = {name: list(map(_wide, own)) for name, own in self._read().items()}
        first, again = (self._flat(self._read()) for _ in range(2))
        if all(one.data_ptr() == other.data_ptr() for one, other in zip(first, again, strict=True)):
            self._current = first
        for optimizer in prepared.optimizers[-1:]:
            optimizer.on_step = [*optimizer.on_step, self._count]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's weights into the average. Called on all ranks; the optimizer's steps call it."""
        if self.is_applied:
            raise RuntimeError(
                "a step inside applied(): the model holds averaged weights, which evaluation reads; end the block "
                "before training goes on"
            )
        average = self._flat(self._average)
        current = self._current or self._flat(self._read())
        if any(
            one.dtype != other.dtype or one.device != other.device
            for one, other in zip(average, current, strict=True)
        ):
            current = [one.to(other) for one, other in zip(current, average, strict=True)]
        self.num_updates += 1
        get_ema_multi_avg_fn(1 - self._weight())(average, current, None)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Have the model hold the averaged weights in the block, for evaluation or an export. Called on all ranks."""
        if self.is_applied:
            raise RuntimeError("applied() inside applied(): the model already holds the averaged weights")
        held = self._weights()
        own = held | {
            name: with_elements(held[name], [one.clone() for one in own_elements(held[name])])
            for name in self._average
        }
        self.is_applied = True
        try:
            self._load(held | self._states(held))
            yield
        finally:
            self._load(own)
            self.is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the average by the names of the model's state. Called on all ranks."""
        if self.is_applied:
            raise RuntimeError(
                "a save inside applied() would take the averaged weights for the model's; end it before"
            )
        return {
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "weights": self._states(self._weights()),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, of the parts that `like` names, after the model was loaded."""
        saved: Mapping[str, Any] = state_dict["weights"]
        if saved.keys() != self._average.keys():
            odd = sorted(saved.keys() ^ self._average.keys())
            raise ValueError(f"the saved average is of another model: {odd[:5]} are in only one of the two")
        self.num_steps, self.num_updates = state_dict["num_steps"], state_dict["num_updates"]
        for name, own in self._average.items():
            for held, loaded in zip(own, own_elements(saved[name]), strict=True):
                held.copy_(loaded.view_as(held))

    def like(self, name: str) -> Any:
        """Return the tensor of the model that one of the state is divided as; None for what is not divided."""
        _, _, name = name.partition("weights/")
        return self._weights().get(name)

    def _count(self) -> None:
        if self._prepared.optimizers[-1].was_skipped:
            return
        self.num_steps += 1
        if self.num_steps >= self.start and (self.num_steps - self.start) % self.every == 0:
            self.update()

    def _weight(self) -> float:
        """Return the share of the model in this update."""
        if self.num_updates == 1 and self.start:
            return 1.0
        if self.decay is None:
            return 1 / self.num_updates
        risen = (1 + self.num_updates) / (self.warmup + self.num_updates) if self.warmup else 1.0
        return 1 - min(self.decay, risen) ** self.every

    def _weights(self) -> dict[str, Any]:
        assert isinstance(self._prepared, SupportsWeights)
        return self._prepared.weights()

    def _load(self, weights: Mapping[str, Any]) -> None:
        assert isinstance(self._prepared, SupportsWeights)
        self._prepared.load_weights(weights)

    def _read(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds of each tensor that is averaged, of one name of tied ones."""
        found: dict[str, list[Tensor]] = {}
        met = set[tuple[int, ...]]()
        for name, value in self._weights().items():
            if name in self._frozen or not getattr(value, "dtype", torch.int64).is_floating_point:
                continue
            own = own_elements(value)
            places = tuple(one.data_ptr() for one in own if one.numel())
            if not places or places not in met:
                found[name] = own
                met.add(places)
        return found

    def _states(self, held: Mapping[str, Any]) -> dict[str, Any]:
        return {name: with_elements(held[name], own) for name, own in self._average.items()}

    @staticmethod
    def _flat(tensors: Mapping[str, list[Tensor]]) -> list[Tensor]:
        return [one for own in tensors.values() for one in own]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
