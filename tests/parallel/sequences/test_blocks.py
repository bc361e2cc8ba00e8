"""A model whose sequences ranks divide computes what the whole one does, or is refused before it has computed."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from drivetrain_parallel import GroupRanks, divide_sequences, plan_sequences
from drivetrain_parallel.compat import DisableTorchFunctionSubclass
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.sequences.block_calls import sequence_dim
from parallel.divided import ThreadRanks, assert_near, gradients, on_threads, trained, with_random_values
from parallel.models import ROUTES
from parallel.transformers_cases import CASES, Case, inputs_of

WIDTH = 16


class Block(nn.Module):
    """A block of a language model, with what may go wrong in one."""

    def __init__(self, *, fault: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.projections, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.drop = nn.Dropout(dropout)
        self.fault = fault

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Map (batch, positions, WIDTH) to the same; scale is of each position."""
        if self.fault == "counts positions":
            x = x + torch.arange(x.shape[1])[:, None]
        heads = self.projections(x * scale).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.fault.startswith("recomputes") and self.training:
            mixed = checkpoint(self.attend, *heads, use_reentrant="reentrant" in self.fault)
        else:
            mixed = self.attend(*heads)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.drop(self.perceptron(x))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fault != "attends itself":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = query @ key.transpose(-1, -2)
        is_seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ value


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2, *, recomputes: bool = False, **options: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, WIDTH), nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        scale = self.places.weight[: tokens.shape[1], :1].abs()
        for block in self.blocks:
            x = checkpoint(block, x, scale, use_reentrant=False) if self.recomputes else block(x, scale)
        return self.head(self.norm(x))


def tokens_of(length: int) -> Tensor:
    return torch.randint(9, (2, length), generator=torch.Generator().manual_seed(length))


def assert_same(
    model: nn.Module,
    size: int,
    inputs: Sequence[Tensor],
    *,
    method: str | None = None,
    call: Any = lambda model, inputs: model(*inputs),
    tolerance: float = 1e-9,
) -> None:
    """Assert that each rank computes the whole output, and that the gradients are the mean over the ranks."""
    whole = deepcopy(model)
    output, _ = trained(whole, inputs, call)
    plan = plan_sequences(model, size, method)

    def work(ranks: ThreadRanks) -> tuple[Tensor, dict[str, Tensor | None]]:
        own = deepcopy(model)
        divide_sequences(own, plan, ranks)
        found, _ = trained(own, inputs, call)
        return found, gradients(own)

    found = on_threads(size, work)
    largest = max(one.abs().max().item() for one in gradients(whole).values() if one is not None)
    for own, _ in found:
        assert_near("the output", own, output, tolerance)
    for name, expected in gradients(whole).items():
        parts = [one for _, held in found if (one := held[name]) is not None]
        mean = torch.stack(parts).mean(0) if parts else None
        assert_near(f"the gradient of {name}", mean, expected, tolerance, 1e-3 * largest)


@pytest.mark.parametrize("method", ["heads", "gathered"])
@pytest.mark.parametrize(("num_blocks", "length"), [(1, 5), (3, 8), (3, 13)])
def test_a_stack_of_blocks_computes_alike(num_blocks: int, length: int, method: str) -> None:
    assert_same(with_random_values(Model(num_blocks)), 2, [tokens_of(length)], method=method)


class Routed(Model):
    """A model of three blocks, which `route` goes through in another way."""

    def __init__(self, route: str, **options: Any) -> None:
        super().__init__(3, **options)
        self.route = ROUTES[route]

    def forward(self, given: Tensor) -> Tensor:
        x = given if given.is_floating_point() else self.words(given)
        scale = self.places.weight[: x.shape[1], :1].abs()

        def call(block: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(block, x, scale, use_reentrant=False) if self.recomputes else block(x, scale)

        return self.head(self.norm(self.route(x, *(partial(call, block) for block in self.blocks))))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.default_cases("False", "returns all states-True")
def test_a_model_may_go_through_its_blocks_in_any_way(route: str, recomputes: bool) -> None:
    assert_same(with_random_values(Routed(route, recomputes=recomputes)), 2, [tokens_of(7)])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.default_cases("adds what went into a block", "returns all states", "moves positions between")
def test_states_between_blocks_are_whole_in_evaluation_too(route: str) -> None:
    whole = with_random_values(Routed(route)).eval()
    expected = whole(tokens_of(7)).detach()

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert_near("the output", own(tokens_of(7)), expected, 1e-9)

    on_threads(2, work)


def test_the_gradient_of_the_input_is_whole_on_each_rank() -> None:
    whole = with_random_values(Routed("goes around"))
    given = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, expected = trained(whole, [given])

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        _, found = trained(own, [given])
        assert_near("the gradient of the input", found[0], expected[0], 1e-9)

    on_threads(2, work)


def test_gradients_of_gradients_are_refused() -> None:
    whole = with_random_values(Routed("leaves early"))

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        given = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(own(given).square().sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()

    with sdpa_kernel(SDPBackend.MATH):
        on_threads(2, work)


def two_lengths(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Two forwards before one backward, which runs the blocks of the first one again after those of the second."""
    return torch.cat([model(inputs[0]), model(inputs[1])], 1)


def test_blocks_that_backward_runs_again_compute_alike() -> None:
    model = with_random_values(Model(recomputes=True))
    for length in (11, 7):  # of 7 and 8, parts are equally long
        assert_same(model, 2, [tokens_of(8), tokens_of(length)], call=two_lengths)


def test_lengths_of_evaluation_do_not_mix_with_those_of_training() -> None:
    model = Model(recomputes=True)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        for length in (8, 7, 8):
            with torch.set_grad_enabled(length == 8):
                loss = own(tokens_of(length)).sum()
            if length == 8:
                loss.backward()

    on_threads(2, work)


def test_a_model_that_evaluates_first_is_tried_too() -> None:
    model = Model()

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        with torch.inference_mode():
            assert_near("the output", own(tokens_of(7)), model(tokens_of(7)), 1e-5)

    on_threads(2, work)


def test_a_copy_of_a_divided_model_computes_with_the_same_ranks() -> None:
    model = Model()

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        assert_near("the copy's output", deepcopy(own)(tokens_of(7)), model(tokens_of(7)), 1e-5)

    on_threads(2, work)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_trial_at_the_first_run_draws_no_numbers(dropout: float) -> None:
    torch.manual_seed(0)
    model = Model(dropout=dropout)
    divide_sequences(model, plan_sequences(model, 2), GroupRanks(dist.group.WORLD))
    torch.manual_seed(1)
    first = model(tokens_of(8))  # is tried
    torch.manual_seed(1)
    assert torch.equal(model(tokens_of(8)), first)


CALLS = {
    "padded": {"attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])},
    "padded behind": {"attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2), "use_cache": False},
    "with its loss": {"labels": torch.tensor([[-100, 6, 7, 8, 9, 5, -100]] * 2)},
    "without a cache": {"use_cache": False},
}
WINDOW = Case(
    model="MistralForCausalLM",
    config="MistralConfig",
    settings={**CASES["mistral"].settings, "sliding_window": 3},
)
PATTERN = Case(
    model="Qwen2ForCausalLM",
    config="Qwen2Config",
    settings={
        **CASES["qwen2"].settings,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"],
    },
)


def call_case(model: nn.Module, inputs: Sequence[Tensor], *, case: Case, **options: Any) -> Any:
    """Return the logits; with labels, those times the loss, so that gradients are of both."""
    output = model(**dict(zip(case.inputs, inputs, strict=True)), **options)
    return output.logits * output.loss if "labels" in options else output


def in_training(case: Case) -> nn.Module:
    """Return a model that trains without dropout."""
    model = with_random_values(case.build()) if case.in_fp64 else case.build()
    for module in model.modules():
        chances = {
            name: 0.0 for name in vars(module) if "dropout" in name and type(getattr(module, name)) is float
        }
        for name, chance in {**chances, **({"p": 0.0} if isinstance(module, nn.Dropout) else {})}.items():
            setattr(module, name, chance)
    return model.train()


def assert_case(case: Case, size: int, method: str | None = None, **options: Any) -> None:
    model = in_training(case)
    call = partial(call_case, case=case, **options)
    # Norms of transformers compute in fp32.
    assert_same(
        model, size, inputs_of(case), method=method, call=call, tolerance=1e-6 if case.in_fp64 else 1e-3
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", ["heads", "gathered"])
@pytest.mark.default_cases("heads", "gathered-padded")
def test_masks_and_losses_of_a_library_are_those_of_the_whole(name: str, method: str) -> None:
    pytest.importorskip("transformers")
    assert_case(CASES["llama"], 2, method, **CALLS[name])


@pytest.mark.parametrize("case", [WINDOW, PATTERN], ids=["window", "windows in some layers"])
@pytest.mark.parametrize("method", ["heads", "gathered"])
def test_sliding_windows_are_those_of_the_whole(case: Case, method: str) -> None:
    pytest.importorskip("transformers")
    assert_case(case, 2, method)


class LargestTensor(TorchDispatchMode):
    """A context that notes the number of elements of the largest tensor that is computed in it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():  # which autograd's operations do not go through
            found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if type(one) is Tensor:
                self.num_elements = max(self.num_elements, one.numel())
        return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.default_cases("qwen3", "gpt2")
def test_the_loss_of_a_library_is_computed_without_logits_of_all_positions(name: str) -> None:
    pytest.importorskip("transformers")
    case = replace(CASES[name], settings={**CASES[name].settings, "vocab_size": 997})
    model, tokens = in_training(case), torch.randint(997, (2, 21), generator=torch.Generator().manual_seed(0))

    def train(own: nn.Module) -> tuple[int, Tensor]:
        with LargestTensor() as largest:
            loss = own(input_ids=tokens, labels=tokens).loss
            loss.backward()
        return largest.num_elements, loss.detach()

    def work(ranks: ThreadRanks) -> tuple[int, Tensor, str, dict[str, Tensor | None]]:
        own = deepcopy(model)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        own(input_ids=tokens)  # compares blocks
        ranks.joined_by = ""
        own.zero_grad()
        largest, loss = train(own)
        return largest, loss, ranks.joined_by, gradients(own)

    (first, loss, joined_by, ones), (second, _, _, others) = on_threads(2, work)
    of_whole, expected = train(model)
    assert max(first, second) < tokens.numel() * 997 <= of_whole
    assert joined_by == ""
    assert_near("the loss", loss, expected, 1e-6)
    for parameter, gradient in gradients(model).items():
        mean = (ones[parameter] + others[parameter]) / 2  # type: ignore[operator]
        assert_near(f"the gradient of {parameter}", mean, gradient, 1e-6, 1e-3)


REFUSED = {
    "t5": "attend to what encoder.block computes",
    "bart": "attend to what model.encoder.layers computes",
    "whisper": "attend to what model.encoder.layers computes",
    "swin": "swin.encoder.layers.0 does not run on divided sequences",
    "gptj": "transformer.h.0 does not run on divided sequences",
    "gemma2": "model.layers.0 does not run on divided sequences",  # its attention is written out by default
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("size", "method"), [(2, None), (2, "gathered"), (3, None)])
@pytest.mark.default_cases("2-None-gpt2", "2-None-vit", "3-None-qwen3")
def test_models_of_a_library_compute_alike_or_are_refused(name: str, size: int, method: str | None) -> None:
    pytest.importorskip("transformers")
    if (reason := REFUSED.get(name)) is None:
        assert_case(CASES[name], size, method)
    else:
        with pytest.raises(ParallelPlanError, match=reason):
            assert_case(CASES[name], size, method)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("counts positions", "blocks.0 computes other values or gradients on divided sequences"),
        ("attends itself", "blocks.0 computes other values or gradients on divided sequences"),
        ("recomputes attention", "blocks.0 does not run on divided sequences"),
        ("recomputes attention, reentrant", "blocks.0 computes other values or gradients"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_block_that_does_not_divide_is_refused_at_its_first_run(
    fault: str, said: str, dropout: float
) -> None:
    model = Model(fault=fault, dropout=dropout).double()
    for block in model.blocks:  # the model's own values show nothing
        nn.init.zeros_(block.output.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ParallelPlanError, match=said):
        assert_same(model, 2, [tokens_of(8)])


def test_generation_with_a_cache_is_refused() -> None:
    pytest.importorskip("transformers")
    model = CASES["llama"].build()

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_sequences(own, plan_sequences(own, 2), ranks)
        own.generate(tokens_of(8), attention_mask=torch.ones(2, 8), max_new_tokens=2, pad_token_id=0)  # type: ignore[operator]

    with pytest.raises(ParallelPlanError, match="a sequence of 1 positions among 2 ranks"):
        on_threads(2, work)


def test_a_model_without_blocks_stays_whole() -> None:
    assert plan_sequences(nn.Linear(2, 2), 2).blocks == ()


def test_what_lists_a_block_twice_or_is_divided_is_refused() -> None:
    block = Block()
    with pytest.raises(ParallelPlanError, match=r"Sequential lists a block of 1 twice"):
        plan_sequences(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([block, Block(), block])), 2)
    with pytest.raises(ParallelPlanError, match="method 'ring' is none of heads, gathered"):
        plan_sequences(Model(), 2, "ring")

    def work(ranks: ThreadRanks) -> None:
        model = Model()
        plan = plan_sequences(model, 2)
        divide_sequences(model, plan, ranks)
        plan_sequences(model, 2)

    with pytest.raises(ParallelPlanError, match="sequences of Model are divided already"):
        on_threads(2, work)


@pytest.mark.ranks(2)
def test_dropout_differs_inside_blocks_and_agrees_outside() -> None:
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    plan = plan_sequences(model, 2)
    assert plan.is_random
    divide_sequences(model, plan, GroupRanks(dist.group.WORLD))
    dropped: list[Tensor] = []
    model.blocks[0].drop.register_forward_hook(lambda _, __, output: dropped.append(output == 0))  # type: ignore[union-attr]
    output = torch.cat([model(tokens_of(8)).detach().flatten(), torch.rand(1)])
    outputs, masks = ([torch.empty_like(one) for _ in range(2)] for one in (output, dropped[-1]))
    dist.all_gather(outputs, output)
    dist.all_gather(masks, dropped[-1])
    assert torch.equal(*outputs)
    assert not torch.equal(*masks)


@pytest.mark.parametrize(
    ("shape", "dtype", "dim"),
    [
        ((2, 8), torch.long, 1),
        ((8,), torch.long, 0),
        ((1, 8, 6), torch.float, 1),
        ((1, 8, 8), torch.float, 1),
        ((8, 3), torch.complex64, 0),
        ((1, 8, 1, 6), torch.float, 1),
        ((1, 1, 8, 6), torch.float, 2),
        ((8, 8), torch.float, None),
        ((2, 8), torch.bool, None),
        ((2, 1, 8, 8), torch.float, None),
        ((2, 5), torch.long, None),
        ((), torch.float, None),
    ],
)
def test_the_dimension_of_positions_is_known_by_shape(
    shape: tuple[int, ...], dtype: torch.dtype, dim: int | None
) -> None:
    assert sequence_dim(torch.zeros(shape, dtype=dtype), 8) == dim
