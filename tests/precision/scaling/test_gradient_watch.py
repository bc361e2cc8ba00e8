"""What a watch finds in real forwards and backwards: which layer is first, what is counted, that nothing changes."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain_precision import watch_gradients
from drivetrain_precision.scaling.gradient_report import GradientReport, NonFiniteValue

TINY = torch.finfo(torch.float16).tiny


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, tuple[Tensor, ...]]


class Block(nn.Module):
    """A residual block with an in-place activation, an identity, and an output in nested containers."""

    def __init__(self, activation: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(8, 8)
        self.same = nn.Identity()
        self.factor = activation

    def forward(self, x: Tensor) -> Output:
        hidden = self.act(self.up(x)).abs() * self.factor
        return Output(hidden=self.same(self.down(hidden)) + x, extra={"all": (x,)})


class Net(nn.Module):
    """Two blocks, attention, and a head; `factor` multiplies inside the second block's own forward."""

    def __init__(self, *, factor: float = 1.0, checkpointed: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(factor)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(lambda x, block=block: block(x).hidden, x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x)

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.checkpointed == "none":
            return block(x)
        if self.checkpointed == "selective":
            return checkpoint(block, x, use_reentrant=False, context_fn=save_some)
        return checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")


def save_some() -> object:
    """Save the results of operations that the watch uses too: those of the watch must not be among them."""
    saved = (torch.ops.aten.abs.default, torch.ops.aten.sum.default, torch.ops.aten.isfinite.default)
    return create_selective_checkpoint_contexts(
        lambda context, operation, *_, **__: (
            CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


def train(
    model: nn.Module, *, dtype: torch.dtype | None = torch.float16, factor: float = 1.0, x: float = 1.0
) -> None:
    """One forward and backward."""
    given = torch.full((2, 3, 8), x, requires_grad=True)  # reentrant checkpointing wants it
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(given)
    (output.float().mean() * factor).backward()


def watched(model: nn.Module, *, underflow: bool = True, **how: object) -> GradientReport:
    with watch_gradients(model, underflow=underflow) as watch:
        train(model, **how)
    return watch.report()


def first(model: nn.Module, **how: object) -> NonFiniteValue:
    found = watched(model, underflow=False, **how).first_nonfinite
    assert found is not None
    return found


def huge(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.fill_(6e4)
        if module.bias is not None:
            module.bias.fill_(6e4)


def test_the_layer_whose_output_overflows_is_named() -> None:
    model = Net()
    huge(model.blocks[1].down)
    found = first(model)
    assert (found.layer, found.layer_type, found.where) == ("blocks.1.down", "Linear", "output")
    assert (found.dtype, found.ranks) == ("float16", ())
    assert str(found) == "the output of blocks.1.down (Linear, float16), whose inputs were finite"


def test_an_overflow_in_a_forwards_own_code_is_told_by_the_module_that_gets_it() -> None:
    found = first(Net(factor=1e9))
    assert (found.layer, found.where, found.parent) == ("blocks.1.down", "input", "blocks.1")
    assert str(found).endswith("it comes from the forward of blocks.1 before it")


def test_a_bad_batch_is_told() -> None:
    assert (
        str(first(Net(), x=float("nan"))) == "the input of the model (Net, float32): it comes from the batch"
    )


def test_the_first_overflow_in_backward_order_is_named() -> None:
    found = first(Net(), factor=3e5)
    assert (found.layer, found.where) == ("head", "parameter gradient")
    assert str(found).startswith(
        "the gradient of weight of head (Linear, float16), of whose output it was finite"
    )


def test_a_gradient_that_overflows_in_a_layers_backward_is_told_from_one_that_comes_from_outside() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False).requires_grad_(False), nn.Identity())
    huge(model[1])
    assert (found := first(model, x=1e-5, factor=1e2)).layer == "1"
    assert found.where == "input gradient"
    found = first(nn.Sequential(nn.Identity(), nn.Linear(8, 8)), factor=float("inf"))
    assert found.where == "output gradient"
    assert "or from the loss" in str(found)


def test_forwards_come_before_backwards_and_the_second_call_of_a_shared_layer_is_told() -> None:
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.fill_(100.0)
    found = first(nn.Sequential(layer, nn.Identity(), layer, layer), dtype=torch.float16)
    assert (found.layer, found.where, found.call) == ("0", "output", 2)
    assert "call 2" in str(found)


def test_masks_of_negative_infinity_are_no_overflow() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(3))

    assert watched(Masked(), dtype=None).first_nonfinite is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_underflow_is_counted_against_the_dtype_that_computes(dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lost = watched(model, dtype=dtype, factor=1e-6)
    shares = [layer.zero_share + layer.subnormal_share for layer in lost.layers]
    assert {layer.dtype for layer in lost.layers} == {str(dtype or torch.float32).removeprefix("torch.")}
    assert all(share > 0.9 for share in shares) if dtype is torch.float16 else shares == [0.0, 0.0]
    kept = watched(model, dtype=dtype, factor=1e3)
    assert all(layer.zero_share + layer.subnormal_share < 0.1 for layer in kept.layers)


def test_each_value_is_counted_once_and_known_gradients_exactly() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).half()

    model, x = nn.Sequential(Scaled()), torch.tensor([0.0, TINY / 2, TINY, 1.0])
    with watch_gradients(model) as watch:
        model(x).backward(torch.ones(4, dtype=torch.float16))
    (layer,) = watch.report().layers
    assert layer.name == "0"
    assert layer.totals == (8, 1, 1, 0, 0)  # four of the output, four of the weight
    watch.reset()
    assert watch.report().layers == ()


@pytest.mark.parametrize("kind", ["none", "full", "reentrant", "selective"])
def test_watching_changes_no_bit_and_recomputed_activations_count_once(kind: str) -> None:
    plain, seen = Net(checkpointed=kind), Net(checkpointed=kind)
    for model in (plain, seen):
        huge(model.blocks[1].down)
        model.blocks[0].requires_grad_(False)  # frozen layers pass gradients on
    train(plain)
    report = watched(seen)
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad) or one.grad.isnan().any()
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["blocks.1.down"].totals.nonfinite_activations == 2 * 3 * 8
    assert by_name["blocks.1.down"].totals.values == 2 * 3 * 8 + 8 * 8 + 8
    assert by_name["blocks.0.down"].totals.values == 2 * 3 * 8
    assert report.first_nonfinite is not None
    assert report.first_nonfinite.layer == "blocks.1.down"


def test_what_does_not_train_is_not_looked_at_and_a_closed_watch_is_gone() -> None:
    model = Net()
    with watch_gradients(model) as watch:
        with torch.no_grad():
            model(torch.full((1, 3, 8), float("nan")))
        model(torch.ones(1, 3, 8)).sum()
        loss = model(torch.ones(1, 3, 8)).sum()
    assert watch.first_nonfinite() is None
    loss.backward()
    assert watch.report().layers == ()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model = Net()
    with watch_gradients(model) as watch:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            huge(twin.head)
            train(twin)
        assert not watch.has_seen


# Torch 2.15 looks at each input's.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_modules_are_listed_as_not_watched() -> None:
    model = Net()
    model.blocks[0].compile(backend="eager")
    model.attention = torch.compile(model.attention, backend="eager")
    with watch_gradients(model, underflow=True) as watch:
        train(model, dtype=None)
    report = watch.report()
    assert report.not_watched == ("blocks.0", "attention")
    assert "compiled, so not watched: blocks.0, attention" in str(report)
    assert {layer.name for layer in report.layers} >= {"head", "blocks.1.up"}


def test_the_table_is_sorted_by_share_and_cut_on_request() -> None:
    report = watched(Net(), factor=1e-3)
    shares = [layer.zero_share + layer.subnormal_share for layer in report.layers]
    assert shares == sorted(shares, reverse=True)
    head, *rows = report.table(most=2).splitlines()
    assert head.split()[:4] == ["layer", "type", "dtype", "gradients"]
    assert len(rows) == 3
    assert rows[-1] == f"and {len(report.layers) - 2} layers with smaller shares"


def test_sparse_gradients_and_whole_numbers_pass() -> None:
    model = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 1))
    with watch_gradients(model) as watch:
        model(torch.tensor([1, 1, 2])).sum().backward()
    assert {layer.name: layer.totals.values for layer in watch.report().layers}["0"] == 2 * 3 * 8


def report_of_rank(bad_rank: int) -> tuple[int, NonFiniteValue | None]:
    model = Net()
    if dist.get_rank() == bad_rank:
        huge(model.blocks[1].down)
    report = watched(model)
    return next(
        layer.totals.values for layer in report.layers if layer.name == "head"
    ), report.first_nonfinite


def test_the_counts_of_ranks_are_summed_and_the_rank_that_overflows_is_named(
    run_ranks: Callable[..., list[object]],
) -> None:
    one, other = run_ranks(report_of_rank, 1)
    assert one == other
    values, found = one
    assert values == 2 * (2 * 3 + 8 + 1)
    assert found.layer == "blocks.1.down"
    assert str(found).endswith("on rank 1")
