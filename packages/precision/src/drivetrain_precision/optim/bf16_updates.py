"""Steps of any optimizer on parameters held in bf16, computed in fp32 and rounded so that small updates count.

The spacing of bf16 numbers is 2**-8 of their size. Smaller updates than half the spacing are lost, and training
stalls at small learning rates. Two remedies need no copy of the weights in fp32:

- "stochastic" rounds up or down at random, so that the mean of many updates is right; it needs no memory.
- "kahan" keeps the rounding error in a second bf16 tensor per parameter and adds it to the next update (Kahan, 1965).

An optimizer keeps its states in the dtype of its parameters. States are computed in fp32 too, and rounded at random,
since a decaying average (AdamW's second moment with a beta of 0.999) would otherwise stop decaying.
"""

from collections.abc import Generator, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain_precision.compat import has_step_hooks
from drivetrain_precision.optim.optimizer_states import local_of
from drivetrain_precision.optim.stochastic_rounding import round_stochastically

SUM, COUNT = "kahan_sum", "num_roundings"  # in the optimizer's state of each parameter
# Of the parameters that are in fp32 at a time: 128 MiB each for values, gradients and states.
_MOST_ELEMENTS = 2**25


class Bf16Updates:
    """Steps of optimizers with some or all parameters held in bf16.

    The random numbers for rounding depend on the parameter's place in the optimizer, on its number of steps (saved in
    the optimizer's state) and on the shard. Thus replicas on several ranks round alike, shards round independently,
    and a resumed run rounds like an uninterrupted run.

    Args:
        rounding: "stochastic" or "kahan".
        most_elements: The maximum number of elements in fp32 at a time with optimizers of `torch.optim`, which update
            each parameter independently; with other optimizers, all elements are in fp32 at once.
    """

    def __init__(
        self, rounding: Literal["stochastic", "kahan"], *, most_elements: int = _MOST_ELEMENTS
    ) -> None:
        if rounding not in ("stochastic", "kahan"):
            raise ValueError(f"rounding={rounding!r}: must be stochastic or kahan")
        self.rounding = rounding
        self._most_elements = most_elements
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer; parameters in other dtypes than bf16 are stepped as usual.

        The optimizer's `step` is called once for each part of the parameters that have a gradient.
        """
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        places = [
            (g, i) for g, params in enumerate(whole) for i, p in enumerate(params) if p.grad is not None
        ]
        sizes = [local_of(whole[g][i]).numel() for g, i in places]
        try:
            # Torch's own optimizers step their parameters part by part with the same result.
            is_separable = type(optimizer).__module__.startswith("torch.optim.") and not has_step_hooks(
                optimizer
            )
            for part in _parts(places, sizes, self._most_elements if is_separable else None):
                self._step_part(optimizer, whole, part)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def _step_part(
        self, optimizer: Optimizer, whole: list[list[Tensor]], part: list[tuple[int, int]]
    ) -> None:
        """Step some parameters; fp32 stand-ins take the place of bf16 parameters and states during the step."""
        standing_in: list[tuple[Tensor, Tensor, str]] = []
        for group in optimizer.param_groups:
            group["params"] = []
        for g, i in part:
            parameter = whole[g][i]
            stepped = parameter
            if parameter.dtype is torch.bfloat16:
                stepped = parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)
                standing_in.append((parameter, stepped, f"{g}.{i}"))
            optimizer.param_groups[g]["params"].append(stepped)
        with self._widen(optimizer, standing_in):
            optimizer.step()

    @contextmanager
    def _widen(self, optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor, str]]) -> Generator[None]:
        """Give stand-ins their parameters' gradients and states; write the results back at the block's end."""
        before: list[dict[str, Any]] = []
        for parameter, wide, _ in pairs:
            assert parameter.grad is not None
            wide.grad = parameter.grad.to(torch.float32)
            state: dict[str, Any] = optimizer.state.pop(parameter, {})
            before.append(state)
            if self.rounding == "kahan" and SUM in state:
                local_of(wide).add_(local_of(state[SUM]))
            given = {key: value for key, value in state.items() if key not in (SUM, COUNT)}
            if given:  # an optimizer takes an empty state for a new one, and an absent one too
                optimizer.state[wide] = {
                    key: value.to(torch.float32) if _is_held(value, parameter) else value
                    for key, value in given.items()
                }
        is_done = False
        try:
            yield
            is_done = True
        finally:
            for (parameter, wide, place), state in zip(pairs, before, strict=True):
                stepped: dict[str, Any] = optimizer.state.pop(wide, {})
                optimizer.state[parameter] = (
                    self._write_back(parameter, wide, place, state, stepped) if is_done else state
                )

    def _write_back(
        self, parameter: Tensor, wide: Tensor, place: str, before: dict[str, Any], stepped: dict[str, Any]
    ) -> dict[str, Any]:
        """Round a stepped value and its state into a parameter, in place, and return the parameter's state."""
        number: int = before.get(COUNT, 0)
        held, value = local_of(parameter), local_of(wide)
        if held.device not in self._generators:
            self._generators[held.device] = torch.Generator(held.device)
        # Each step of each shard has random numbers of its own, which a resumed run draws again.
        seed = crc32(f"{place} {number} {_shard_of(parameter)}".encode())
        generator = self._generators[held.device].manual_seed(seed)
        state: dict[str, Any] = {COUNT: number + 1}
        if self.rounding == "kahan":
            held.copy_(value)
            state[SUM] = before[SUM] if SUM in before else torch.empty_like(parameter).detach()
            local_of(state[SUM]).copy_(value.sub_(held))
        else:
            round_stochastically(value, generator, out=held)
        for key, result in stepped.items():
            if not _is_held(result, parameter, dtype=torch.float32):
                state[key] = result
                continue
            old = before.get(key)
            state[key] = old if _is_held(old, parameter) else torch.empty_like(parameter).detach()
            round_stochastically(local_of(result), generator, out=local_of(state[key]))
        return state


def forget_updates(optimizer: Optimizer, rounding: str | None) -> int:
    """Drop the state of other roundings than `rounding` (None: of all), such as after loading a checkpoint.

    Returns the number of parameters with dropped "kahan" sums.
    """
    num_dropped = 0
    unused = {"kahan": (), "stochastic": (SUM,)}.get(rounding or "", (SUM, COUNT))
    for state in optimizer.state.values():
        if isinstance(state, MutableMapping):  # an optimizer may keep anything under a parameter
            num_dropped += SUM in unused and SUM in state
            for key in unused:
                state.pop(key, None)
    return num_dropped


def _parts(
    places: list[tuple[int, int]], sizes: Iterable[int], most: int | None
) -> Iterator[list[tuple[int, int]]]:
    """Divide parameters into parts of about `most` elements; None makes one part."""
    part: list[tuple[int, int]] = []
    filled = 0
    for place, size in zip(places, sizes, strict=True):
        if part and most is not None and filled + size > most:
            yield part
            part, filled = [], 0
        part.append(place)
        filled += size
    yield part  # also an empty one: a step without gradients is one too


def _is_held(value: Any, parameter: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether a value of a state is a plain tensor of the parameter's shape, in `dtype`."""
    is_plain = type(value) is Tensor or (isinstance(value, Tensor) and hasattr(value, "to_local"))
    return is_plain and value.dtype is dtype and value.dim() > 0 and value.shape == parameter.shape


def _shard_of(tensor: Any) -> tuple[int, ...]:
    """Return the coordinates of this rank's shard; empty for a full tensor, equal on replicas."""
    placements = getattr(tensor, "placements", ())  # those of a DTensor
    sharded = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    return tuple(tensor.device_mesh.get_local_rank(axis) for axis in sharded)
