"""Models are trained with their weights away."""

import copy
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import (
    WIDTH,
    Checkpointed,
    CheckpointedBlocks,
    Stack,
    Tree,
    Uses,
    assert_same_gradients,
    same_values,
    streamed,
)
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.dispatch import dispatch_model, offload_stats


class TestTraining:
    """Weights and what the optimizer keeps are on the host; forward and backward bring what they need."""

    @pytest.mark.parametrize("kind", ["stack", "tree", "checkpointed"])
    def test_training_is_the_same_bit_by_bit(self, kind: str) -> None:
        torch.manual_seed(0)
        kinds = ["gate", "attention", "recurrent", "listed", "norm", "linear"]
        model: nn.Module = Tree(kinds, [0, 1, 2, 3, 1, 4, 5, 6], tied=True, borrows=False)
        if kind == "stack":
            model = Stack()
        if kind == "checkpointed":
            model = Checkpointed()
        plain = copy.deepcopy(model)
        streamed(model)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, plain)]
        for step in range(4):
            for _ in range(1 + step % 2):  # gradients of two backwards add up
                x = torch.randn(3, WIDTH)
                losses = [one(x).square().sum() for one in (model, plain)]
                assert torch.equal(*losses)
                for loss in losses:
                    loss.backward()
            assert_same_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert same_values(model.state_dict(), plain.state_dict())

    def test_a_graph_does_not_keep_the_weights_of_its_forward(self) -> None:
        model = streamed(Stack(8))
        loss = model(torch.randn(2, WIDTH)).sum()
        brought = offload_stats(model).bytes_fetched
        loss.backward()
        assert offload_stats(model).bytes_fetched > 1.8 * brought

    def test_gradients_are_autograds_own(self) -> None:
        torch.manual_seed(0)
        plain = Stack()
        model = streamed(copy.deepcopy(plain))
        x = torch.randn(2, WIDTH)
        for one in (model, plain):
            one(x).sum().backward()
            first = torch.autograd.grad(one(x).square().sum(), list(one.parameters()), create_graph=True)
            sum(gradient.square().sum() for gradient in first).backward()
        assert_same_gradients(model, plain)

    def test_two_threads_train_one_model(self) -> None:
        torch.manual_seed(0)
        model = streamed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)

        def train() -> None:
            for _ in range(50):
                model(torch.ones(1, 4)).sum().backward()

        try:
            threads = [threading.Thread(target=train) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            sys.setswitchinterval(interval)
        assert torch.equal(model[2].bias.grad, torch.full((4,), 100.0))

    @pytest.mark.parametrize(
        "use",
        [
            lambda x, w: x * w.conj(),
            lambda x, w: x.real * w.real[:3],
            lambda x, w: x * w.imag,
            lambda x, w: torch.view_as_real(w).sum(-1) * x,
        ],
    )
    def test_views_of_complex_weights_are_saved_as_they_are(
        self, use: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        torch.manual_seed(0)
        plain = Uses(use)
        model = copy.deepcopy(plain)
        dispatch_model(model, {"": "cpu"}, dtypes={"weight": torch.complex64})
        gradients: list[Tensor] = []
        for one in (model, plain):
            x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
            one(x).abs().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
        assert torch.equal(model.weight.grad, plain.weight.grad)

    def test_a_sparse_tensor_may_be_saved(self) -> None:
        torch.manual_seed(0)
        plain = Stack(1)
        model = streamed(copy.deepcopy(plain))
        adjacency = torch.eye(2).to_sparse()
        for one in (model, plain):
            hook = one.register_forward_hook(
                lambda _module, _args, output: torch.sparse.mm(adjacency, output)
            )
            one(torch.ones(2, WIDTH)).sum().backward()
            hook.remove()
        assert torch.equal(model.layers[0].weight.grad, plain.layers[0].weight.grad)

    def test_an_activation_that_is_changed_in_place_is_told(self) -> None:
        model = Uses(lambda x, w: (x * w).sigmoid().mul_(2))
        dispatch_model(model, {"": "cpu"}, dtypes={"weight": torch.complex64})
        with pytest.raises(OffloadedError, match="was changed in place after the forward used it"):
            model(torch.ones(3)).abs().sum().backward()

    def test_a_weight_that_changes_before_its_backward_is_told(self) -> None:
        model = streamed(Stack())
        loss = model(torch.randn(2, WIDTH)).sum()
        with torch.no_grad():
            model.layers[4].weight.add_(1)
        with pytest.raises(OffloadedError, match=r"a weight of shape \[8, 8\] was changed after the forward"):
            loss.backward()

    @pytest.mark.filterwarnings("ignore:a weight that is stored in:UserWarning")
    def test_weights_of_another_dtype_are_trained(self) -> None:
        torch.manual_seed(0)
        model = Stack().bfloat16()
        streamed(model)
        x = torch.randn(4, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses: list[float] = []
        for _ in range(8):
            loss = (model(x) - 0.3).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0] * 0.9
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("use_reentrant", [False, True])
class TestComputedAgain:
    """Layers of which nothing was saved: their forward is computed again in the backward."""

    def test_what_is_computed_again_is_on_its_way(self, use_reentrant: bool) -> None:
        torch.manual_seed(0)
        plain = CheckpointedBlocks(use_reentrant=use_reentrant)
        model = streamed(copy.deepcopy(plain))
        missed: list[int] = []
        brought: list[int] = []
        for _ in range(3):
            x = torch.randn(2, WIDTH)
            losses = [one(x).square().sum() for one in (model, plain)]
            before = offload_stats(model)
            for loss in losses:
                loss.backward()
            after = offload_stats(model)
            missed.append(after.num_missed - before.num_missed)
            brought.append(after.bytes_fetched - before.bytes_fetched)
            assert_same_gradients(model, plain)
            for parameter in (*model.parameters(), *plain.parameters()):
                _step(parameter)
        assert missed == [12, 0, 0]  # the first backward is learnt from
        assert (
            brought[1:] == [13 * (WIDTH * WIDTH + WIDTH) * 4] * 2
        )  # nothing but the head and the blocks, once

    def test_a_step_within_the_backward_changes_what_is_computed_again(self, use_reentrant: bool) -> None:
        torch.manual_seed(0)
        plain = CheckpointedBlocks(use_reentrant=use_reentrant, shared=True)
        model = streamed(copy.deepcopy(plain))
        for one in (model, plain):
            for parameter in one.blocks.parameters():
                parameter.register_post_accumulate_grad_hook(_step)
        for _ in range(3):
            x = torch.randn(2, WIDTH)
            for one in (model, plain):
                one(x).square().sum().backward()
            assert same_values(model.state_dict(), plain.state_dict())

    def test_a_backward_that_failed_leaves_nothing_old(self, use_reentrant: bool) -> None:
        torch.manual_seed(0)
        plain = CheckpointedBlocks(use_reentrant=use_reentrant)
        model = streamed(copy.deepcopy(plain))
        x = torch.randn(2, WIDTH)
        model(x).sum().backward()
        calls: list[int] = []

        def fail_again(*_: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError("in the middle")

        handle = model.blocks[1][1].register_forward_pre_hook(fail_again)
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            model(x).sum().backward()
        handle.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not model.blocks[1](x).any()
        model.load_state_dict(plain.state_dict())
        model.zero_grad()
        for one in (model, plain):
            one(x).sum().backward()
        assert_same_gradients(model, plain)


def _step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(0.1 * parameter.grad)
    parameter.grad = None
