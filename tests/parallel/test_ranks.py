"""Real processes divide a model: collectives, training, and what they draw at random."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drivetrain_parallel import GroupRanks, divide_model, named_cuts, part_of, plan_experts, plan_model
from drivetrain_parallel.ranks import add_up, enter, exchange, join
from parallel.models import WIDTH, Attention, Block, Experts, Perceptron, Routed


def of_all() -> GroupRanks:
    assert dist.group.WORLD is not None
    return GroupRanks(dist.group.WORLD)


def gathered(value: Tensor) -> list[Tensor]:
    """Return a tensor of all ranks, of one shape."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


def assert_alike(value: Tensor) -> None:
    first, *others = gathered(value)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.ranks(3)
def test_tensors_are_added_up_and_joined() -> None:
    ranks = of_all()
    assert (ranks.rank, ranks.size) == (dist.get_rank(), 3)
    tensor = torch.full((2, 2), float(ranks.rank))
    ranks.add_up(tensor)
    assert torch.equal(tensor, torch.full((2, 2), 3.0))
    sizes = (2, 0, 3)
    own = torch.full((2, sizes[ranks.rank], 4), float(ranks.rank))
    joined = ranks.join(own, 1, sizes)
    assert joined[0, :, 0].tolist() == [0, 0, 2, 2, 2]
    assert joined.shape == (2, 5, 4)


class Copies(TorchDispatchMode):
    """Counts the calls that write the elements of one tensor into another on this rank."""

    num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.num_copies += func._schema.name in (
            "aten::copy_",
            "aten::cat",
            "aten::clone",
            "aten::constant_pad_nd",
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_equal_parts_are_joined_by_one_copy_or_none(dim: int) -> None:
    ranks = of_all()
    whole = torch.arange(4 * 4 * 4).view(4, 4, 4)
    own = whole.chunk(2, dim)[ranks.rank].contiguous()
    with Copies() as copies:
        joined = ranks.join(own, dim, (2, 2))
    assert torch.equal(joined, whole)
    assert copies.num_copies == (dim > 0)


@pytest.mark.ranks(2)
def test_gradients_cross_ranks_where_values_do() -> None:
    ranks = of_all()
    whole = torch.ones(2, requires_grad=True)
    (enter(whole, ranks) * (ranks.rank + 1)).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [3, 3]

    part = torch.full((2,), float(ranks.rank), requires_grad=True)
    total = add_up(part * 1, ranks)
    (total * 5).sum().backward()
    assert total.tolist() == [1, 1]
    assert part.grad is not None
    assert part.grad.tolist() == [5, 5]

    sizes = (1, 2)
    piece = torch.full((2, sizes[ranks.rank]), float(ranks.rank), requires_grad=True)
    joined = join(piece, -1, sizes, ranks)
    (joined * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert joined[0].tolist() == [0, 1, 1]
    assert piece.grad is not None
    assert piece.grad[0].tolist() == ([1.0] if ranks.rank == 0 else [2.0, 3.0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_exchanged_and_their_gradients_sent_back(dtype: torch.dtype) -> None:
    ranks = of_all()
    sent, received = ([1, 2], [1, 0]) if ranks.rank == 0 else ([0, 0], [2, 0])
    rows = torch.arange(sum(sent) * 2, dtype=dtype).view(-1, 2).requires_grad_()
    found = exchange(rows, ranks, sent, received)
    assert found.tolist() == ([[0, 1]] if ranks.rank == 0 else [[2, 3], [4, 5]])
    (found * torch.tensor([[1.0, ranks.rank]], dtype=dtype)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == ([[1, 0], [1, 1], [1, 1]] if ranks.rank == 0 else [])


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    losses: list[float] = []
    for _ in range(steps):
        batch = torch.randn(3, 5, WIDTH, generator=generator, dtype=torch.float64)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training(size: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(Block(), Attention(norm=nn.LayerNorm(4)), Perceptron()).double()
    divided = deepcopy(whole)
    plan = plan_model(divided, size)
    ranks = of_all()
    divide_model(divided, plan, ranks)
    assert train(divided, 5) == pytest.approx(train(whole, 5), rel=1e-12)
    cuts = {name: cut for name, _, cut in named_cuts(divided, plan)}
    assert len(cuts) > 8
    for name, parameter in whole.named_parameters():
        expected = part_of(parameter, cuts[name], ranks.rank, size) if name in cuts else parameter
        torch.testing.assert_close(divided.get_parameter(name), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_train_the_model_that_one_trains(run_ranks: Callable[..., object], size: int) -> None:
    run_ranks(check_training, size, num_processes=size)


def dropped(model: nn.Module, ending: str) -> list[Tensor]:
    """Return a list that is given, at each forward, what the modules of a name have dropped."""
    found: list[Tensor] = []

    def look(module: nn.Module, given: object, output: Tensor) -> None:
        found.append((output == 0).float())

    for name, module in model.named_modules():
        if name.endswith(ending):
            module.register_forward_hook(look)
    return found


def blocks() -> nn.Module:
    """Two blocks with dropout, divided; all ranks have one seed."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(dropout=0.5), Block(dropout=0.5))
    divide_model(model, plan_model(model, dist.get_world_size()), of_all())
    torch.manual_seed(1)
    return model


@pytest.mark.ranks(2)
def test_dropout_outside_is_the_same_on_all_ranks_and_differs_inside() -> None:
    model = blocks()
    inside, outside = dropped(model, "inside"), dropped(model, "outside")
    output = model(torch.randn(2, 5, WIDTH))
    output.sum().backward()
    assert_alike(output)
    assert_alike(torch.get_rng_state())
    for mask in inside:
        first, second = gathered(mask)
        assert first.any()
        assert not torch.equal(first, second)
    for mask in outside:
        assert mask.any()
        assert_alike(mask)
    assert not torch.equal(*inside)
    assert not torch.equal(*outside)


@pytest.mark.ranks(3)
def test_ranks_of_other_numbers_of_heads_draw_the_same_outside() -> None:
    model = blocks()
    for _ in range(2):
        output = model(torch.randn(2, 5, WIDTH))
        output.sum().backward()
        assert_alike(output)
        assert_alike(torch.get_rng_state())


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("no memory is left")
        return x.relu()


@pytest.mark.ranks(2)
def test_all_ranks_draw_the_same_after_a_failure_between_the_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), Block(FailsOnce(), dropout=0.5))
    plan = plan_model(model, 2)
    divide_model(model, plan, of_all())
    torch.manual_seed(1)
    first = dropped(model, "0")
    model[1].between.fails = True
    with pytest.raises(RuntimeError, match="no memory is left"):
        model(torch.ones(2, 5, WIDTH))
    assert_alike(torch.get_rng_state())
    assert_alike(torch.randn(8))
    output = model(torch.ones(2, 5, WIDTH))
    output.sum().backward()
    assert_alike(output)
    assert_alike(torch.get_rng_state())
    assert not torch.equal(first[0], first[1])


class Checkpointed(nn.Module):
    """Blocks of which backward computes the whole, or what stands between the layers, again."""

    def __init__(self, model: nn.Module, part: str) -> None:
        super().__init__()
        self.model, self.part = model, part

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model.children():
            assert isinstance(block, Block)
            x = checkpoint(block, x, use_reentrant=False) if self.part == "block" else self.run(block, x)
        return x

    def run(self, block: Block, x: Tensor) -> Tensor:
        def up(given: Tensor) -> Tensor:
            return block.inside(block.between(block.up(given)))

        def between(given: Tensor) -> Tensor:
            return block.inside(block.between(given))

        x = block.mlp_norm(x)
        if self.part == "first layer":
            return block.outside(block.down(checkpoint(up, x, use_reentrant=False)))
        if self.part == "between":
            return block.outside(block.down(checkpoint(between, block.up(x), use_reentrant=False)))
        return block.outside(block.down(up(x)))


def steps(part: str, *, is_checkpointed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of three steps, and the state of the generator."""
    torch.manual_seed(0)
    model = Checkpointed(nn.Sequential(Block(dropout=0.5), Block(dropout=0.5)), part)
    plan = plan_model(model.model, dist.get_world_size())
    assert plan.random
    if not is_checkpointed:
        model = Checkpointed(model.model, "none") if part != "block" else model.model
    placed = plan_model(model, dist.get_world_size())
    divide_model(model, placed, of_all())
    torch.manual_seed(1)
    found: list[Tensor] = []
    gradients: list[Tensor] = []
    for _ in range(3):
        output = model(torch.randn(2, 5, WIDTH, requires_grad=True))
        output.square().sum().backward()
        found += [output.detach(), torch.get_rng_state()]
        gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return found, gradients


def check_checkpoint(part: str) -> None:
    alike, gradients = steps(part, is_checkpointed=True)
    expected, others = steps(part, is_checkpointed=False)
    for own, other in zip(alike, expected, strict=True):
        assert torch.equal(own, other)
        assert_alike(own)
    for own, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("part", ["block", "first layer", "between"])
def test_what_is_computed_again_drops_the_same(run_ranks: Callable[..., object], part: str) -> None:
    run_ranks(check_checkpoint, part)


class DroppingExperts(Experts):
    """Experts that drop elements of what they compute."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(torch.dropout(tokens, 0.5, self.training), index, weights)


@pytest.mark.ranks(3)
def test_ranks_that_share_tokens_draw_the_same_outside_experts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Routed(DroppingExperts()), nn.Dropout(0.5))
    plan = plan_experts(model, 3)
    assert plan.random == {"0.experts"}
    divide_model(model, plan, of_all(), alike=of_all())
    torch.manual_seed(1)
    for _ in range(2):
        output = model(torch.randn(2, 5, WIDTH))
        output.sum().backward()
        assert_alike(output)
        assert_alike(torch.get_rng_state())
