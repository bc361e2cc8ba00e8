"""A model that threads divide, compared with the whole one: what it returns, and every gradient."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from threading import Barrier, Thread
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from drivetrain_parallel import ParallelPlan, divide_model, named_cuts, part_of, plan_model

T = TypeVar("T")
Call = Callable[[nn.Module, Sequence[Tensor]], Any]


class ThreadRanks:
    """A thread that stands for a rank."""

    def __init__(self, rank: int, barrier: Barrier, given: list[Tensor]) -> None:
        self.rank, self.size = rank, len(given)
        self._barrier, self._given = barrier, given
        self.joined_by = ""  # the function that last asked for whole logits

    def add_up(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        found = self._exchange(tensor)
        assert tuple(one.shape[dim] for one in found) == sizes
        return torch.cat(found, dim)

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        assert tensor.is_contiguous()
        sent, received = (one or [1] * self.size for one in (sent, received))
        assert len(tensor) == sum(sent)
        numbers = self._exchange(torch.tensor(sent))
        given = zip(self._exchange(tensor), numbers, strict=True)
        found = [rows.split(each.tolist())[self.rank] for rows, each in given]
        assert [len(rows) for rows in found] == list(received)
        return torch.cat(found)

    def meet(self, place: str, by: str) -> None:
        self.joined_by = by
        found = self._exchange(torch.tensor([crc32(place.encode())]))
        assert all(torch.equal(one, found[0]) for one in found), f"ranks are not all at {place}"

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


def on_threads(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Return what `work` returns on each of `size` threads; raise what one of them raises first."""
    barrier = Barrier(size, timeout=60)
    given, found = [torch.empty(0)] * size, dict[int, T]()
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, barrier, given))
        except BaseException as error:  # noqa: BLE001 raised again below
            errors.append(error)  # before the barrier makes the others fail
            barrier.abort()

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]


def call_once(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return model(*inputs)


def trained(
    model: nn.Module, inputs: Sequence[Tensor], call: Call = call_once
) -> tuple[Tensor, list[Tensor | None]]:
    """Return a model's output and the gradients of its inputs of floats; parameters get theirs."""
    own = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
    output = call(model, own)
    if not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return output.detach(), [one.grad for one in own if one.is_floating_point()]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter, under all of its names."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(
    model: nn.Module,
    inputs: Sequence[Tensor],
    plan: ParallelPlan,
    *,
    call: Call = call_once,
    tolerance: float = 1e-9,
) -> set[str]:
    """Assert that a divided model computes what the whole one does, on every rank.

    Return which functions asked for the whole of divided logits; "" stands for none.
    """
    whole = deepcopy(model)
    output, of_inputs = trained(whole, inputs, call)
    expected = gradients(whole)

    def work(ranks: ThreadRanks) -> str:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        cuts = {name: cut for name, _, cut in named_cuts(own, plan)}
        found, of_own = trained(own, inputs, call)
        # What rounding leaves of a gradient that is zero, such as that of a key's bias, is compared with the largest.
        largest = max(one.abs().max().item() for one in expected.values() if one is not None)
        assert_near("the output", found, output, tolerance)
        for index, (one, other) in enumerate(zip(of_own, of_inputs, strict=True)):
            assert_near(f"the gradient of input {index}", one, other, tolerance)
        for name, gradient in gradients(own).items():
            whole_one = expected[name]
            if name in cuts and whole_one is not None:
                whole_one = part_of(whole_one, cuts[name], ranks.rank, ranks.size)
            assert_near(
                f"the gradient of {name} on rank {ranks.rank}", gradient, whole_one, tolerance, 1e-3 * largest
            )
        return ranks.joined_by

    return set(on_threads(plan.size, work))


def assert_near(
    what: str, found: Tensor | None, expected: Tensor | None, tolerance: float, scale: float = 1e-12
) -> None:
    if found is None or expected is None:
        assert all(one is None or not one.any() for one in (found, expected)), f"{what} is missing"
        return
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    if not found.numel():
        return
    difference = (found - expected).abs().max() / (scale + expected.abs().max())
    assert difference <= tolerance, f"{what} differs by {difference:.1e}"


def with_random_values(model: nn.Module) -> nn.Module:
    """Return the model in fp64 with random parameters, so that no layer is zero and no norm is the identity."""
    generator = torch.Generator().manual_seed(1)
    model = model.double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def divided_alike(
    model: nn.Module,
    size: int,
    inputs: Sequence[Tensor],
    styles: Mapping[str, str] | None = None,
    **options: Any,
) -> list[str]:
    """Plan and compare a model; return the names of the layers that are divided."""
    model = with_random_values(model)
    plan = plan_model(model, size, styles)
    assert_same(model, inputs, plan, **options)
    return [layer.name for layer in plan.layers]
