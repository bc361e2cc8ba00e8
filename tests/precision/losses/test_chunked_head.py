"""Losses and gradients are those of torch's cross entropy, however tokens are cut into chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from drivetrain_precision import chunked_cross_entropy


def head(
    tokens: int = 7, size: int = 5, words: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias that require gradients, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, size), (words, size), (words,))
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    labels = torch.randint(words, (tokens,), generator=generator)
    labels[::3] = -100
    hidden, weight, bias = (value.requires_grad_() for value in values)
    return hidden, weight, bias, labels


def whole(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
    **options: Any,
) -> Tensor:
    """The loss as torch computes it, from all logits."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), labels, **options)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 12),
    size=st.integers(1, 6),
    words=st.integers(1, 9),
    chunk=st.integers(1, 14),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    cap=st.sampled_from([None, 0.5, 30.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 5),
)
def test_losses_and_gradients_are_those_of_torch(
    tokens: int,
    size: int,
    words: int,
    chunk: int,
    reduction: str,
    smoothing: float,
    cap: float | None,
    with_bias: bool,
    seed: int,
) -> None:
    hidden, weight, bias, labels = head(tokens, size, words, seed=seed)
    used = bias if with_bias else None
    inputs = [hidden, weight] + [bias] * with_bias
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = chunked_cross_entropy(
        hidden, weight, labels, bias=used, chunk_tokens=chunk, logit_softcap=cap, **options
    )
    theirs = whole(hidden, weight, labels, used, cap, **options)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    if tokens > 1:  # torch's gradients of a mean over no token depend on the version
        outer = torch.arange(1.0, ours.numel() + 1, dtype=ours.dtype).reshape(ours.shape)
        torch.testing.assert_close(
            torch.autograd.grad(ours, inputs, outer), torch.autograd.grad(theirs, inputs, outer)
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradients_are_the_differences_of_the_loss(smoothing: float, cap: float | None) -> None:
    hidden, weight, bias, labels = head()
    assert torch.autograd.gradcheck(
        lambda h, w, b: chunked_cross_entropy(
            h, w, labels, bias=b, chunk_tokens=3, label_smoothing=smoothing, logit_softcap=cap
        ),
        (hidden, weight, bias),
    )


def test_logits_in_bf16_have_their_softmax_in_fp32() -> None:
    hidden, weight, _, labels = head(64, 32, 1000, torch.float32)
    half, half_weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
    loss = chunked_cross_entropy(half, half_weight, labels, chunk_tokens=10)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(half, half_weight).float(), labels))


def test_bf16_is_used_on_request_for_weights_in_fp32() -> None:
    hidden, weight, _, labels = head(64, 32, 1000, torch.float32)
    loss = chunked_cross_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16)
    expected = F.cross_entropy(F.linear(hidden.bfloat16(), weight.bfloat16()).float(), labels)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert [each.dtype for each in gradients] == [torch.float32] * 2
    exact = torch.autograd.grad(whole(hidden, weight, labels), (hidden, weight))
    for ours, theirs in zip(gradients, exact, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_under_autocast_the_products_are_in_its_dtype() -> None:
    hidden, weight, _, labels = head(64, 32, 1000, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunked_cross_entropy(hidden.bfloat16(), weight, labels)
        asked = chunked_cross_entropy(hidden, weight, labels, logits_dtype=torch.float32)
    torch.testing.assert_close(
        inside, chunked_cross_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16), rtol=0, atol=0
    )
    torch.testing.assert_close(asked, whole(hidden, weight, labels))


def test_sums_of_many_chunks_keep_what_a_sum_in_bf16_would_lose() -> None:
    hidden = torch.ones(65, 1, dtype=torch.bfloat16)
    hidden[0] = 512
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(65, dtype=torch.long)
    chunked_cross_entropy(hidden, weight, labels, reduction="sum", chunk_tokens=1).backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [-288.0, 288.0]  # in bf16 the halves that are added to 256 vanish


def test_small_gradients_survive_fp16_under_a_loss_scale() -> None:
    hidden, weight, _, labels = head(32, 8, 2000, torch.float32)
    hidden, weight = (each.detach().mul(0.01).half().requires_grad_() for each in (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels)
    (scaled,) = torch.autograd.grad(loss * 2.0**14, hidden)
    exact = torch.autograd.grad(whole(hidden.float(), weight.float(), labels), hidden)[0]
    assert (scaled.float() / 2**14 - exact).norm() < 0.01 * exact.norm()


def test_a_mean_over_no_token_is_nan_with_gradients_of_zero_as_in_torch() -> None:
    hidden, weight, _, labels = head()
    ignored = torch.full_like(labels, -100)
    ours, theirs = (chunked_cross_entropy(hidden, weight, ignored), whole(hidden, weight, ignored))
    assert ours.isnan()
    assert theirs.isnan()
    for loss in (ours, theirs):
        assert not any(each.any() for each in torch.autograd.grad(loss, (hidden, weight)))
    assert chunked_cross_entropy(hidden, weight, ignored, reduction="sum").item() == 0


def test_a_frozen_head_gets_no_gradient_and_a_second_use_adds_its_own() -> None:
    hidden, weight, _, labels = head()
    frozen = weight.detach()
    chunked_cross_entropy(hidden, frozen, labels, chunk_tokens=2).backward()
    assert frozen.grad is None
    assert hidden.grad is not None
    twice = chunked_cross_entropy(hidden, weight, labels) + chunked_cross_entropy(
        hidden * 2, weight, labels, chunk_tokens=2
    )
    theirs = whole(hidden, weight, labels) + whole(hidden * 2, weight, labels)
    torch.testing.assert_close(
        torch.autograd.grad(twice, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight))
    )


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    _, weight, _, labels = head()
    words = torch.tensor([1, 3, 3, 0, 5, 6, 2])
    losses = (
        chunked_cross_entropy(F.embedding(words, weight), weight, labels, chunk_tokens=3),
        whole(F.embedding(words, weight), weight, labels),
    )
    ours, theirs = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    torch.testing.assert_close(ours, theirs)


def test_sums_with_counts_accumulate_to_the_gradient_of_the_whole_batch() -> None:
    hidden, weight, _, labels = head(12)
    for rows in (slice(0, 3), slice(3, 12)):
        (
            chunked_cross_entropy(hidden[rows], weight, labels[rows], reduction="sum")
            / (labels != -100).sum()
        ).backward()
    torch.testing.assert_close(weight.grad, torch.autograd.grad(whole(hidden, weight, labels), weight)[0])


def test_a_retained_graph_gives_the_same_gradients_again_and_gradients_of_gradients_are_refused() -> None:
    hidden, weight, _, labels = head()
    loss = chunked_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, weight, retain_graph=True), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_tokens_of_any_number_of_axes_keep_them() -> None:
    hidden, weight, _, labels = head(12)
    shaped = chunked_cross_entropy(hidden.view(3, 4, -1), weight, labels.view(3, 4), reduction="none")
    assert shaped.shape == (3, 4)
    torch.testing.assert_close(shaped.flatten(), whole(hidden, weight, labels, reduction="none"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_torch_compile_traces_it_whole(backend: str) -> None:
    hidden, weight, _, labels = head(dtype=torch.float32)

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden * 1.5, weight, labels, chunk_tokens=3)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    ours, theirs = compiled(hidden, weight, labels), step(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(7)}, "indices of words"),
        ({"labels": torch.zeros(6, dtype=torch.long)}, r"shape \(6,\).*\(7,\).*shift both"),
        ({"weight": torch.zeros(11, 4)}, r"\(words, hidden size\)"),
        ({"bias": torch.zeros(4)}, r"must be \(11,\)"),
        ({"weight": torch.zeros(11, 5)}, "logits_dtype="),
        ({"logits_dtype": torch.int8}, "floating-point"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
        ({"reduction": "average"}, "reduction='average'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = head()
    with pytest.raises((TypeError, ValueError), match=message):
        chunked_cross_entropy(**({"hidden": hidden, "weight": weight, "labels": labels} | change))


def test_a_label_beyond_the_words_is_an_error() -> None:
    hidden, weight, _, labels = head()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, labels.masked_fill(labels > 0, 11))


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no loss by chunks of its own"
)
def test_torchs_own_loss_by_chunks_rounds_its_result_to_bf16() -> None:
    """Why torch's is not used: when this fails, look at docs/howto/large_vocabularies.md again."""
    hidden, weight, _, labels = head(8, 4, 100, torch.bfloat16)
    loss = F.linear_cross_entropy(hidden, weight, labels, options=nn.LinearCrossEntropyOptions())
    assert loss.dtype is torch.bfloat16


class Language(nn.Module):
    """An embedding, one layer, and a head whose forward is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.layer(self.embed(words)).tanh()
        return (
            hidden
            if labels is None
            else chunked_cross_entropy(hidden, self.head.weight, labels, chunk_tokens=2)
        )


def head_gradient_of_shards(where: str) -> tuple[Tensor, Tensor]:
    """The head's gradient under FSDP2, and that of one process with all tokens."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    words = torch.arange(8 * size).view(size, 8) % 16
    alone = Language()
    alone(words.flatten(), words.flatten()).backward()
    model = Language()
    for module in (model.layer, model.head):
        fully_shard(module)
    fully_shard(model)
    if where == "root":
        loss = chunked_cross_entropy(model(words[rank]), head_of(model), words[rank])
    else:
        model.head.unshard()  # pyright: ignore[reportCallIssue]
        loss = model(words[rank], words[rank])
    loss.backward()
    gradient = model.head.weight.grad
    assert isinstance(gradient, DTensor)
    assert alone.head.weight.grad is not None
    return gradient.full_tensor(), alone.head.weight.grad


def head_of(model: Language) -> Tensor:
    """The head's weight for a loss outside of any forward; a part of it is refused first."""
    with pytest.raises(TypeError, match=r"DTensor.*unshard"):
        chunked_cross_entropy(torch.ones(1, 8), model.head.weight, torch.zeros(1, dtype=torch.long))
    model.head.unshard()  # pyright: ignore[reportCallIssue]
    return model.head.weight


@pytest.mark.parametrize("where", ["root", "forward"])
def test_a_sharded_head_is_refused_until_it_is_gathered_and_its_gradient_is_then_reduced(
    where: str, run_ranks: Any
) -> None:
    for sharded, alone in run_ranks(head_gradient_of_shards, where):
        torch.testing.assert_close(sharded, alone)
