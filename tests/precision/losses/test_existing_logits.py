"""The loss of logits in half precision is that of their copy in fp32, without the copy."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_precision import cross_entropy


@settings(max_examples=40)
@given(
    tokens=st.integers(2, 9),
    words=st.integers(1, 9),
    chunk=st.integers(1, 10),
    smoothing=st.sampled_from([0.0, 0.2]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_losses_and_gradients_are_those_of_torch(
    tokens: int, words: int, chunk: int, smoothing: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, words).to(dtype).requires_grad_()
    labels = torch.randint(words, (tokens,))
    labels[0] = -1
    ours = cross_entropy(logits, labels, ignore_index=-1, label_smoothing=smoothing, chunk_tokens=chunk)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    theirs = F.cross_entropy(wide, labels, ignore_index=-1, label_smoothing=smoothing)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))


def test_gradients_are_the_differences_of_the_loss() -> None:
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 3, -100], [1, 2, 2]])
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, labels, chunk_tokens=4, label_smoothing=0.1, reduction="none"), logits
    )


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(5, 7, requires_grad=True)
    before = logits.detach().clone()
    cross_entropy(logits, torch.zeros(5, dtype=torch.long)).backward()
    assert torch.equal(logits, before)


def test_logits_without_words_last_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels have the shape \(2, 5\).*\(2, 7\)"):
        cross_entropy(torch.zeros(2, 7, 5), torch.zeros(2, 5, dtype=torch.long))
