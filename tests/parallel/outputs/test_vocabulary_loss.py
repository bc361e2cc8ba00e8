import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain_parallel import GroupRanks
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.outputs.vocabulary_loss import cross_entropy_of_parts
from parallel.divided import ThreadRanks, assert_near, on_threads
from parallel.divided_tensors import OneOfTwo, of_columns, peak_bytes

IGNORED = -100


def compare(
    logits: Tensor, target: Tensor, sizes: tuple[int, ...], tolerance: float = 1e-11, **options
) -> None:
    """Compare loss and gradient of each rank with torch's, of the whole logits in the dtype that parts compute in."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    whole = logits.detach().to(wide).requires_grad_()
    expected = F.cross_entropy(whole, target, **options)
    expected.sum().backward()
    assert whole.grad is not None

    def work(ranks: ThreadRanks) -> Tensor:
        first = sum(sizes[: ranks.rank])
        own = slice(first, first + sizes[ranks.rank])
        part = logits[:, own].detach().clone().requires_grad_()
        loss = cross_entropy_of_parts(part, target, PartLayout.of_columns(part, sizes, ranks), **options)
        loss.sum().backward()
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        rounding = torch.finfo(logits.dtype).eps if logits.dtype is not wide else tolerance
        torch.testing.assert_close(
            part.grad.to(wide), whole.grad[:, own], rtol=rounding, atol=tolerance, equal_nan=True
        )
        return loss.detach()

    first, *others = on_threads(len(sizes), work)
    assert all(torch.equal(first.nan_to_num(), one.nan_to_num()) for one in others)


@st.composite
def cases(draw) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, object]]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    num_rows, num_words = draw(st.integers(0, 5)), sum(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    logits = torch.randn(num_rows, num_words, dtype=torch.float64, generator=generator) * draw(
        st.sampled_from([1, 300])
    )
    target = torch.randint(num_words, (num_rows,), generator=generator)
    ignored = draw(st.sampled_from([IGNORED, -1, 0]))
    if ignored < 0:
        target[torch.rand(num_rows, generator=generator) < 0.3] = ignored
    weight = torch.rand(num_words, dtype=torch.float64, generator=generator)
    options = {
        "weight": draw(st.sampled_from([None, weight])),
        "ignore_index": ignored,
        "reduction": draw(st.sampled_from(["none", "sum", "mean"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
    }
    return logits, target, sizes, options


@given(cases())
def test_the_loss_of_parts_is_that_of_the_whole(case) -> None:
    logits, target, sizes, options = case
    compare(logits, target, sizes, **options)


def test_words_that_cannot_be_and_rows_that_are_ignored_may_be_infinite() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64)
    logits[:, :3] = -torch.inf  # all that the first rank holds
    logits[2] = torch.inf
    target = torch.tensor([3, 6, IGNORED, 5])
    sizes = (3, 4)

    def work(ranks: ThreadRanks) -> tuple[float, Tensor]:
        own = slice(0, 3) if ranks.rank == 0 else slice(3, 7)
        part = logits[:, own].clone().requires_grad_()
        loss = cross_entropy_of_parts(part, target, PartLayout.of_columns(part, sizes, ranks))
        loss.backward()
        assert part.grad is not None
        return loss.item(), part.grad[[0, 1, 3]]

    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()
    assert whole.grad is not None
    (loss, first), (_, second) = on_threads(2, work)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat([first, second], 1), whole.grad[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 50) * 3).to(dtype)
    compare(logits, torch.randint(50, (6,)), (20, 30), tolerance=1e-5, label_smoothing=0.1)


def test_more_logits_than_are_computed_at_a_time() -> None:
    num_words = 2**21 + 1  # of a rank, so that a row alone is a chunk
    logits = torch.randn(2, num_words + 1)
    compare(logits, torch.tensor([num_words, 5]), (num_words, 1), tolerance=1e-5)


@pytest.mark.parametrize("bad", [7, -1, 1000, torch.iinfo(torch.int64).min])
def test_a_target_that_is_no_word_is_refused_on_every_rank(bad: int) -> None:
    def work(ranks: ThreadRanks) -> None:
        part = torch.randn(2, (3, 4)[ranks.rank])
        layout = PartLayout.of_columns(part, (3, 4), ranks)
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            cross_entropy_of_parts(part, torch.tensor([1, bad]), layout)

    on_threads(2, work)


def test_gradients_of_gradients_are_refused() -> None:
    def work(ranks: ThreadRanks) -> None:
        part = torch.randn(2, 3, requires_grad=True)
        loss = cross_entropy_of_parts(part, torch.tensor([1, 4]), PartLayout.of_columns(part, (3, 3), ranks))
        with pytest.raises(RuntimeError, match="no gradients of gradients"):
            torch.autograd.grad(loss, part, create_graph=True)

    on_threads(2, work)


@pytest.mark.ranks(2)
def test_torchs_parallel_loss_is_the_same() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 12, dtype=torch.float64, generator=generator)
    target = torch.tensor([0, 11, IGNORED, 5, 6, 3])
    mesh = init_device_mesh("cpu", (2,))
    theirs = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        expected = F.cross_entropy(theirs, target)
        expected.backward()
    assert dist.group.WORLD is not None
    ranks = GroupRanks(dist.group.WORLD)
    part = logits.chunk(2, 1)[ranks.rank].clone().requires_grad_()
    loss = F.cross_entropy(of_columns(part, (6, 6), ranks), target)
    loss.backward()
    assert loss.item() == pytest.approx(expected.full_tensor().item(), rel=1e-12)
    assert_near("the gradient", part.grad, theirs.grad.to_local(), 1e-12)


@pytest.mark.filterwarnings("ignore")  # the profiler warns of machines without a GPU
def test_a_rank_allocates_the_gradient_of_its_own_words() -> None:
    num_rows, num_words = 512, 32_768
    target = torch.randint(num_words // 2, (num_rows,))
    whole = torch.randn(num_rows, num_words, requires_grad=True)
    part = torch.randn(num_rows, num_words // 2, requires_grad=True)
    of_whole = peak_bytes(lambda: F.cross_entropy(whole, target).backward())
    divided = of_columns(part, (num_words // 2,) * 2, OneOfTwo())
    of_parts = peak_bytes(lambda: F.cross_entropy(divided, target).backward())
    own_bytes = part.numel() * part.element_size()
    assert (
        of_whole > 5.9 * own_bytes
    )  # the softmax, its gradient and that of the logits, each of twice the words
    assert of_parts < 1.1 * own_bytes
