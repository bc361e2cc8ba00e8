"""Divided logits are the whole logits to whatever looks at them; the loss and what treats rows leave them divided."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain_parallel import GroupRanks, divide_model, named_cuts, part_of, plan_model
from drivetrain_parallel.compat import DisableTorchFunctionSubclass
from drivetrain_parallel.outputs.divided_tensor import DividedTensor
from parallel.divided import ThreadRanks, assert_near, assert_same, on_threads, with_random_values
from parallel.divided_tensors import Function, assert_same_of_parts, of_columns
from parallel.models import WIDTH, Perceptron

SIZES = (3, 4, 2)
WHOLE = torch.randn(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
TARGET = torch.tensor([[0, 8, -100, 3, 6], [2, 2, 7, 5, -100]])
SCALE = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

BY_ROW: dict[str, Function] = {
    "view": lambda x: x.view(-1, 9),
    "view of a size": lambda x: x.view((10, 9)),
    "view of the last": lambda x: x.view(2, 5, -1),
    "reshape": lambda x: x.reshape(5, 2, 9),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten to the last but one": lambda x: torch.flatten(x, end_dim=-2),
    "a slice": lambda x: x[:, :-1],
    "a slice in full": lambda x: x[..., 1:, :],
    "an index": lambda x: x[0],
    "an index before an ellipsis": lambda x: x[1, ...],
    "a new dimension": lambda x: x[:, None],
    "a mask": lambda x: x[ROWS],
    "an index of rows": lambda x: x[:, torch.tensor([3, 0, 3])],
    "float": lambda x: x.float().double(),
    "to": lambda x: x.to(torch.float32).to(dtype=torch.float64),
    "contiguous": lambda x: x[:, 1:].contiguous(),
    "clone": lambda x: x.clone(),
    "soft cap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "a scale": lambda x: 2 * x * torch.tensor(0.5),
    "a shift": lambda x: 1 - (x - 1),
    "elements": lambda x: F.gelu(-x) * F.silu(x.abs().sqrt()) + x.sigmoid() / x.pow(2).exp(),
    "shifted rows": lambda x: x[..., :-1, :].contiguous().view(-1, 9),
}
WHOLE_ALONE: dict[str, Function] = {
    "a word": lambda x: x[..., 0],
    "some words": lambda x: x[..., :8],
    "words by index": lambda x: x[:, :, torch.tensor([8, 0])],
    "a word of a mask": lambda x: x[:, 2, WHOLE[0, 0] > 0],
    "a new last dimension": lambda x: x[..., None],
    "merged": lambda x: x.view(2, -1),
    "all in one": lambda x: x.flatten(),
    "other rows": lambda x: x.view(9, 10),
    "other rows, inferred": lambda x: x.view(9, -1),
    "transposed": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float64),
    "log sum": lambda x: x.logsumexp(-1),
    "argmax": lambda x: x.argmax(-1),
    "greatest": lambda x: x.max(-1).values,
    "a sum of two": lambda x: x + x.flip(-1),
    "a scale of each word": lambda x: x * torch.arange(9.0),
    "a learned scale": lambda x: x * SCALE,
    "concatenated": lambda x: torch.cat([x, x * 2], 1),
    "detached": lambda x: x.detach(),
    "as integers": lambda x: x.to(torch.int64),
    "a loss of distributions": lambda x: F.cross_entropy(x.view(-1, 9), WHOLE.view(-1, 9).softmax(-1)),
    "a loss of classes in the middle": lambda x: F.cross_entropy(x, torch.zeros(2, 9, dtype=torch.int64)),
}
CHANGED: dict[str, Function] = {
    "words": lambda x: _changed(x, lambda y: y[..., 2:4].fill_(-5.0)),
    "a view": lambda x: _changed(x, lambda y: y.view(-1, 9)[3].zero_()),
    "an item": lambda x: _changed(x, lambda y: y.__setitem__((0, ..., 8), 1.0)),
    "all": lambda x: _changed(x, lambda y: y.div_(2)),
    "rows": lambda x: _changed(x, lambda y: y[0].mul_(3)),
}


def _changed(logits: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """Return rows of logits that were changed in place after a view was taken."""
    rows = logits.view(-1, 9)
    change(logits)
    return rows * 1.0


@pytest.mark.parametrize("name", BY_ROW)
def test_functions_of_rows_leave_logits_divided(name: str) -> None:
    assert assert_same_of_parts(BY_ROW[name], WHOLE, SIZES) == (True, "")


@pytest.mark.parametrize("name", WHOLE_ALONE)
def test_any_other_function_is_given_the_whole(name: str) -> None:
    is_divided, joined_by = assert_same_of_parts(WHOLE_ALONE[name], WHOLE, SIZES)
    assert not is_divided
    assert joined_by


@pytest.mark.parametrize("name", CHANGED)
def test_changes_in_place_are_seen_by_views_and_by_the_gradient(name: str) -> None:
    assert_same_of_parts(CHANGED[name], WHOLE, SIZES)


@pytest.mark.parametrize("first", BY_ROW)
def test_the_loss_of_rows_joins_nothing(first: str) -> None:
    rows = BY_ROW[first](WHOLE).numel() // 9
    target = TARGET.flatten().repeat(2)[:rows]

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(BY_ROW[first](logits).reshape(-1, 9), target, label_smoothing=0.1)

    assert assert_same_of_parts(loss, WHOLE, SIZES) == (False, "")


# Functions that keep the shape: by row, of the whole, and changes in place.
STEPS: tuple[Function, ...] = (
    *(BY_ROW[name] for name in ("float", "clone", "soft cap", "a scale")),
    lambda x: x.flatten(0, 1).view(2, -1, 9),
    lambda x: x[:, :],
    lambda x: x.flip(-1),
    lambda x: x - x.logsumexp(-1, keepdim=True),
    lambda x: x.mul_(0.5),
    lambda x: (x.view(-1, 9)[3].add_(1), x)[1],
    lambda x: (x[..., 2:4].zero_(), x)[1],
    lambda x: x + x[0],
)


@given(st.lists(st.sampled_from(STEPS), max_size=5), st.sampled_from(STEPS))
def test_steps_in_any_order_compute_what_they_do_of_the_whole(steps: list[Function], after: Function) -> None:
    def loss(logits: Tensor) -> Tensor:
        logits = logits * 1.0
        for step in steps:
            logits = step(logits)
        rows = logits.view(-1, 9)
        return F.cross_entropy(rows, TARGET.flatten()) + after(logits).square().mean() + rows.max()

    assert_same_of_parts(loss, WHOLE, SIZES)


def on_ranks(work: Callable[[Tensor, Tensor, ThreadRanks], Any]) -> list[Any]:
    """Return what each thread returns of divided logits and of its part, a leaf."""

    def run(ranks: ThreadRanks) -> Any:
        first = sum(SIZES[: ranks.rank])
        part = WHOLE[..., first : first + SIZES[ranks.rank]].clone().requires_grad_()
        return work(of_columns(part, SIZES, ranks), part, ranks)

    return on_threads(len(SIZES), run)


def test_they_look_like_the_whole_and_tell_so_without_joining() -> None:
    def work(logits: Tensor, part: Tensor, ranks: ThreadRanks) -> None:
        assert isinstance(logits, Tensor)
        assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == (WHOLE.shape, 9, 3, 2)
        assert (logits.dtype, logits.device, logits.stride()) == (WHOLE.dtype, WHOLE.device, WHOLE.stride())
        assert logits.numel() == WHOLE.numel()
        assert logits.is_contiguous()
        assert logits.is_floating_point()
        assert logits.requires_grad
        assert logits.grad_fn is not None
        assert not logits.is_leaf
        assert ranks.joined_by == ""
        assert str(logits.tolist()) == str(WHOLE.tolist())
        assert ranks.joined_by == "tolist"

    on_ranks(work)


def test_they_are_joined_once() -> None:
    def work(logits: Tensor, part: Tensor, ranks: ThreadRanks) -> str:
        logits.argmax(-1)
        logits.view(-1, 9).softmax(-1).sum().backward()
        F.cross_entropy(logits.view(-1, 9), TARGET.flatten())
        return ranks.joined_by

    assert on_ranks(work) == ["argmax"] * 3


def test_what_is_joined_without_gradients_has_its_gradient_later() -> None:
    def work(logits: Tensor, part: Tensor, ranks: ThreadRanks) -> None:
        with torch.inference_mode():
            assert not logits.argmax(-1).requires_grad
        logits.square().sum().backward()
        assert_near("the gradient", part.grad, 2 * part.detach(), 1e-12)

    on_ranks(work)


def test_hooks_see_gradients_of_the_whole() -> None:
    def work(logits: Tensor, part: Tensor, ranks: ThreadRanks) -> list[Tensor]:
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        logits.retain_grad()
        loss = F.cross_entropy(logits.view(-1, 9), TARGET.flatten()) + logits.logsumexp(-1).square().mean()
        loss.backward()
        return [torch.cat([seen[0]]), torch.cat([logits.grad])]

    leaf = WHOLE.clone().requires_grad_()
    (F.cross_entropy(leaf.view(-1, 9), TARGET.flatten()) + leaf.logsumexp(-1).square().mean()).backward()
    for found in on_ranks(work):
        for gradient in found:
            assert_near("the gradient", gradient, leaf.grad, 1e-12)


@pytest.mark.parametrize("changes", [False, True])
def test_autograd_is_asked_for_gradients_of_what_the_logits_are_now(changes: bool) -> None:
    def gradient(logits: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.view(-1, 9), TARGET.flatten()) + logits.logsumexp(-1).square().mean()
        if changes:
            logits.mul_(2)
            loss = loss + F.cross_entropy(logits.view(-1, 9), TARGET.flatten())
        (found,) = torch.autograd.grad(loss, logits)
        return torch.cat([found])  # which joins it

    expected = gradient(WHOLE.clone().requires_grad_() * 1)
    for found in on_ranks(lambda logits, part, ranks: gradient(logits)):
        assert_near("the gradient", found, expected, 1e-12)


def test_two_losses_of_the_same_logits_add_up_in_parts() -> None:
    def loss(logits: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        return F.cross_entropy(rows, TARGET.flatten()) + F.cross_entropy(
            logits[:, 1:].reshape(-1, 9), rows_after
        )

    rows_after = TARGET[:, 1:].flatten()
    assert assert_same_of_parts(loss, WHOLE, SIZES) == (False, "")


class NegativeLogLikelihood(torch.autograd.Function):
    """A function that is given the tensor past torch's functions, as those of fused losses are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return -logits.log_softmax(-1)[..., 0].sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        one = torch.zeros_like(logits)
        one[..., 0] = 1
        return outer[0] * (logits.softmax(-1) - one)


def test_an_autograd_function_of_another_library_is_given_the_whole() -> None:
    is_divided, joined_by = assert_same_of_parts(NegativeLogLikelihood.apply, WHOLE, SIZES)
    assert not is_divided
    assert joined_by == "log_softmax"


def test_code_past_torchs_functions_may_not_change_them() -> None:
    def work(logits: Tensor, part: Tensor, ranks: ThreadRanks) -> None:
        with (
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
            pytest.raises(RuntimeError, match=r"aten\.mul_\.Tensor changes a divided tensor in place"),
        ):
            logits.mul_(2)

    on_ranks(work)


class Words(nn.Module):
    """An embedding, a perceptron and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(9, WIDTH), Perceptron(), nn.Linear(WIDTH, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.words(tokens)))


STYLES = {"words": "vocabulary", "head": "vocabulary_column"}
TOKENS = torch.tensor([[0, 1, 2, 3, 8], [8, 7, 3, 3, 1]])


def divided(ranks: Any, style: str = "vocabulary_column") -> Words:
    torch.manual_seed(0)
    model = Words().double()
    divide_model(model, plan_model(model, ranks.size, STYLES | {"head": style}), ranks)
    return model


def test_a_head_joins_at_once_where_ranks_may_do_different_things() -> None:
    def work(ranks: ThreadRanks) -> list[bool]:
        model, eager = divided(ranks), divided(ranks, "gathered_column")
        with torch.no_grad():
            without_gradient = model(TOKENS)
        trains, evaluates = model(TOKENS), model.eval()(TOKENS)
        return [
            isinstance(one, DividedTensor) for one in (trains, evaluates, without_gradient, eager(TOKENS))
        ]

    assert on_threads(2, work) == [[True, False, False, False]] * 2


def test_a_head_that_is_tied_or_not_computes_the_loss_of_one_process() -> None:
    for is_tied in (False, True):
        model = with_random_values(Words())
        if is_tied:
            model.head.weight = model.words.weight
        plan = plan_model(model, 3, STYLES)
        assert plan.layers[-1].style == "vocabulary_column"
        assert_same(model, [TOKENS], plan, call=loss_of)
        assert_same(model, [TOKENS], plan)


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    return F.cross_entropy(model(*inputs).flatten(0, 1), TARGET.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_loss_in_fp32(dtype: torch.dtype) -> None:
    def work(ranks: ThreadRanks) -> tuple[float, torch.dtype]:
        model = divided(ranks).float()
        with torch.autocast("cpu", dtype):
            logits = model(TOKENS)
            loss = F.cross_entropy(logits.flatten(0, 1), TARGET.flatten())
            assert isinstance(logits, DividedTensor)
            assert logits.dtype is dtype
        loss.backward()
        assert loss.item() == pytest.approx(
            F.cross_entropy(logits.flatten(0, 1).float(), TARGET.flatten()).item()
        )
        return loss.item(), loss.dtype

    assert {found for _, found in on_threads(2, work)} == {torch.float32}


def of_all(timeout_seconds: float = 60) -> GroupRanks:
    assert dist.group.WORLD is not None
    return GroupRanks(dist.group.WORLD, host=dist.new_group(timeout=timedelta(seconds=timeout_seconds)))


def wrapped(how: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what calls a model as programs do that know nothing of divided logits."""
    if how.startswith("DDP"):
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        options = dict.fromkeys(how.split()[1:], True)
        return DistributedDataParallel(model, process_group=alone, **options)
    if how.startswith("checkpoint"):
        is_reentrant = how.endswith("reentrant")
        return lambda tokens: checkpoint(
            lambda x: model.head(model.inner(x)), model.words(tokens), use_reentrant=is_reentrant
        )
    return torch.compile(model, backend="aot_eager") if how == "compiled model" else model


WRAPPED = [
    "DDP",
    "DDP find_unused_parameters",
    "DDP static_graph",
    "checkpoint",
    "checkpoint, reentrant",
    "compiled model",
    "compiled loss",
    "compiled other loss",
]


def other_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1), target)


def check_wrapped(how: str) -> None:
    ranks = of_all()
    torch.manual_seed(0)
    whole = Words().double()
    F.cross_entropy(whole(TOKENS).flatten(0, 1), TARGET.flatten()).backward()
    model = divided(ranks)
    loss = other_loss if how.endswith("other loss") else F.cross_entropy
    if how.startswith("compiled") and how.endswith("loss"):
        loss = torch.compile(loss, backend="aot_eager")
    called = wrapped(how, model)  # which torch holds by a weak reference
    loss(called(TOKENS).flatten(0, 1), TARGET.flatten()).backward()
    cuts = {name: cut for name, _, cut in named_cuts(model, plan_model(whole, 2, STYLES))}
    for name, parameter in whole.named_parameters():
        expected = parameter.grad
        if name in cuts and expected is not None:
            expected = part_of(expected, cuts[name], ranks.rank, 2)
        assert_near(f"the gradient of {name}", model.get_parameter(name).grad, expected, 1e-11)


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.default_cases("checkpoint, reentrant")
@pytest.mark.filterwarnings("ignore")  # torch.compile and DDP warn of themselves
def test_what_wraps_a_model_or_its_loss_leaves_it_right(run_ranks: Callable[..., object], how: str) -> None:
    run_ranks(check_wrapped, how, timeout_seconds=150)


def ask_alone() -> tuple[str, float]:
    """Look at logits on one rank, while the other goes on to the loss."""
    ranks, said = of_all(timeout_seconds=1), ""
    logits = divided(ranks)(TOKENS)
    if ranks.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            logits.argmax(-1)
        said = str(caught.value)
    return said, F.cross_entropy(logits.flatten(0, 1), TARGET.flatten()).item()


def test_a_rank_that_looks_alone_is_told_so_and_disturbs_no_loss(run_ranks: Callable[..., Any]) -> None:
    (said, loss), (_, other) = run_ranks(ask_alone)
    assert said.startswith("argmax() asks on this rank for the whole")
    assert "(head, call 0)" in said
    assert loss == other


@pytest.mark.ranks(2)
def test_ranks_that_look_at_different_logits_are_told_so() -> None:
    ranks = of_all()
    model = divided(ranks)
    logits = [model(TOKENS) for _ in range(2)]
    with pytest.raises(
        RuntimeError, match=rf"max\(\) asks on this rank .*\(head, call {ranks.rank}\).*on all ranks"
    ):
        logits[ranks.rank].max()
