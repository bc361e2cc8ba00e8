"""Try a plan of one module: its divided form, on as many ranks as the plan says, computes what the module computes.

The ranks are threads of this process, so that a plan needs no process group and no other rank.
"""

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Barrier, BrokenBarrierError, Thread

import torch
from torch import Tensor, nn

from drivetrain_parallel.compat import shared_attributes
from drivetrain_parallel.layers.apply import divide_model, named_cuts, part_of
from drivetrain_parallel.plan import LayerPlan, ParallelPlan

TOLERANCE = 1e-3  # relative: in fp32, sums of another order differ by 1e-6, and a wrong division by 1
NOISE = (
    1e-5  # of the largest gradient: what rounding leaves of one that is zero, such as that of a key's bias
)


class _ThreadRanks:
    """A thread of several, each of which stands for a rank."""

    def __init__(self, rank: int, barrier: Barrier, given: list[Tensor]) -> None:
        self.rank, self.size = rank, len(given)
        self._barrier, self._given = barrier, given

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def add_up(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        del sizes
        return torch.cat(self._exchange(tensor), dim)

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        del received
        numbers = self._exchange(torch.tensor(sent or [1] * self.size))
        given = zip(self._exchange(tensor), numbers, strict=True)
        return torch.cat([rows.split(each.tolist())[self.rank] for rows, each in given])

    def meet(self, place: str, by: str) -> None:
        del place, by
        self._barrier.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """The values that a module computes.

    Attributes:
        outside: The output of the module and the gradients of its inputs.
        more: The tensors that it returns beside its output, such as the weights of each head.
        gradients: The gradients of its parameters, by name.
    """

    outside: list[Tensor]
    more: list[Tensor]
    gradients: dict[str, Tensor]


class Trial:
    """A module with random values and a random input, on which plans are tried; as it trains, if it draws nothing.

    Args:
        module: The module, which is copied; it may be on the meta device.
        width: The size of the last dimension of its input, of shape (2, 5, width).
        more: The arguments beside the input, by default None for each that the forward wants; the input is then of
            their first dimension, and of shape (rows, width).

    Attributes:
        is_possible: Whether the module can be run so at all.
        draws: Whether it draws random numbers when it trains.
    """

    def __init__(self, module: nn.Module, width: int, more: Sequence[Tensor] = ()) -> None:
        generator = torch.Generator().manual_seed(0)
        self._module = with_random_values(module)
        shape = more[0].shape[:1] if more else (2, 5)
        first = torch.randn(*shape, width, generator=generator, dtype=torch.float32)
        self._inputs = first, *(more or [None] * _num_required(module))
        self._expected, self.draws = None, False
        with torch.random.fork_rng(devices=[]):
            try:
                before = torch.get_rng_state()
                self._expected = _run(self._module, self._inputs)
                self.draws = not torch.equal(before, torch.get_rng_state())
                if self.draws:
                    self._expected = _run(self._module.eval(), self._inputs)
            except Exception:  # noqa: BLE001 whatever a module raises on a bare tensor, it is not tried so
                self._expected = None
        self.is_possible = self._expected is not None

    def settled(self, plan: ParallelPlan) -> ParallelPlan | None:
        """Return the plan if the divided module gives the outputs and the gradients of the whole one, else None.

        Modules between a column and a row layer whose gradients are parts, such as a norm of each head, are added to
        it, for these parts to be added up.
        """
        (region,) = {layer.region for layer in plan.layers}
        if self.draws:
            plan = replace(plan, random=frozenset({region}))
        parts = self._wrong_gradients(plan)
        if parts is None or not parts:
            return None if parts is None else plan
        holders = {name.rpartition(".")[0] for name in parts}
        if holders & {layer.name for layer in plan.layers}:
            return None
        summed = (LayerPlan(name=name, style="summed", region=region) for name in sorted(holders))
        settled = replace(plan, layers=(*plan.layers, *summed))
        return None if self._wrong_gradients(settled) != set() else settled

    def _wrong_gradients(self, plan: ParallelPlan) -> set[str] | None:
        """Return the parameters whose gradient is not a rank's part; None if a rank computes something else."""
        expected = self._expected
        if expected is None or len(found := self._run_divided(plan)) < plan.size:
            return None
        if not all(
            are_near(own, other, 0.0)
            for values in found.values()
            for own, other in zip(values.outside, expected.outside, strict=True)
        ):
            return None
        # What has another shape, such as the weights of this rank's heads, cannot be taken for the whole.
        if not all(
            own.shape != other.shape or are_near(own, other, 0.0)
            for values in found.values()
            for own, other in zip(values.more, expected.more, strict=True)
        ):
            return None
        cuts = {name: cut for name, _, cut in named_cuts(self._module, plan)}
        noise = NOISE * max(
            (one.abs().max().item() for one in expected.gradients.values() if one.numel()), default=0
        )
        wrong: set[str] = set()
        for rank, values in found.items():
            for name, whole in expected.gradients.items():
                other = part_of(whole, cuts[name], rank, plan.size) if name in cuts else whole
                if not are_near(values.gradients[name], other, noise):
                    wrong.add(name)
        return wrong

    def _run_divided(self, plan: ParallelPlan) -> dict[int, _Values]:
        """Return what each rank computes that does not fail."""
        # A module that draws is tried as it evaluates. Threads that read and set one generator may end in a deadlock.
        plan = replace(plan, random=frozenset())
        barrier = Barrier(plan.size)
        given, found = [torch.empty(0)] * plan.size, dict[int, _Values]()

        def run(rank: int) -> None:
            try:
                module = deepcopy(self._module)
                divide_model(module, plan, _ThreadRanks(rank, barrier, given))
                if (values := _run(module, self._inputs)) is not None:
                    found[rank] = values
            except BrokenBarrierError:
                return
            except Exception:  # noqa: BLE001 a wrong division fails in as many ways as there are modules
                barrier.abort()

        with torch.random.fork_rng(devices=[]):  # all threads draw from one generator
            threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(plan.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found


def are_near(own: Tensor, other: Tensor, noise: float, tolerance: float = TOLERANCE) -> bool:
    """Return whether a tensor is another, up to a tolerance of its largest value and to noise."""
    if own.shape != other.shape:
        return False
    if not own.numel():
        return True
    return bool((own - other).abs().max() <= tolerance * (1e-6 + other.abs().max()) + noise)


def is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter holds numbers, and not codes and scales."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


def with_random_values(module: nn.Module, exchanged: Mapping[Tensor, Tensor] | None = None) -> nn.Module:
    """Return a copy of a module on the CPU, in fp32 and training mode, with random parameters.

    Args:
        module: The module, which may be on the meta device.
        exchanged: Tensors of the module, with those that the copy holds in their place.
    """
    new = shared_attributes(module) | {id(own): other for own, other in (exchanged or {}).items()}
    for number, parameter in enumerate(filter(is_plain, module.parameters())):
        generator = torch.Generator().manual_seed(
            1 + number
        )  # ranks hold parts of other sizes, and equal wholes
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * fan_in**-0.5
        new[id(parameter)] = nn.Parameter(values)  # deepcopy takes it for the copy
    copied = deepcopy(module, new)
    return copied.float().train()


@torch.enable_grad()
def _run(module: nn.Module, given: Sequence[Tensor | None]) -> _Values | None:
    """Return what a module computes of some inputs; None if it returns no tensor that depends on those of floats."""
    own = [one if one is None else one.clone().requires_grad_(one.is_floating_point()) for one in given]
    returned = module(*own)
    output, *more = returned if isinstance(returned, tuple) and returned else (returned,)
    if not isinstance(output, Tensor) or not output.is_floating_point() or not output.requires_grad:
        return None
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    of_inputs = [one.grad for one in own if one is not None and one.requires_grad]
    found = [one for one in of_inputs if one is not None]
    if len(found) < len(of_inputs):
        module.zero_grad()
        return None
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()
    }
    module.zero_grad()  # its copies need none
    beside = [one.detach() for one in more if isinstance(one, Tensor) and one.is_floating_point()]
    return _Values(outside=[output.detach(), *found], more=beside, gradients=gradients)


def _num_required(module: nn.Module) -> int:
    """Return the number of arguments that a module wants beside its input, such as a mask, which may be None."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters[1:])
