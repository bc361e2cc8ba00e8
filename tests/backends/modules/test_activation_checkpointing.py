from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_backends.modules.activation_checkpointing import (
    checkpoint_activations,
    checkpointing_of,
    restore_activations,
)

SMALL: Any = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 16,
}  # fmt: skip


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.num_forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.num_forwards += 1
        return torch.tanh(self.dropout(self.linear(x))) * scale


def test_modules_of_one_class_still_are_of_one() -> None:
    modules = [Counting(), Counting(), nn.Linear(4, 4)]
    checkpoint_activations(modules, "full")
    assert type(modules[0]) is type(modules[1]) is not type(modules[2])


def gradients(kind: str) -> tuple[Counting, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    module = Counting()
    checkpoint_activations([module], kind)
    module(torch.ones(2, 4), scale=2.0).sum().backward()
    return module, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_checkpointed_module_runs_again_in_backward_with_the_same_gradients(kind: str) -> None:
    plain, expected = gradients("none")
    module, found = gradients(kind)
    assert (plain.num_forwards, module.num_forwards) == (1, 2)
    assert isinstance(module, Counting)
    assert checkpointing_of(module) == kind
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def saved(kind: str) -> int:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 16))
    checkpoint_activations([module], kind)
    products = 0

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal products
            products += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    output = module(torch.ones(2, 4))
    with Counter():
        output.sum().backward()
    return products


def test_selective_checkpointing_repeats_no_matrix_product() -> None:
    # Of the two products full checkpointing repeats one: backward needs no output of the last.
    assert (saved("none"), saved("full"), saved("selective")) == (0, 1, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_would_keep_keys_and_values_for_generation_keeps_none(kind: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    found: list[tuple[float, list[Tensor | None]]] = []
    for each in ("none", kind):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL, attn_implementation=attention)
        model: Any = transformers.LlamaForCausalLM(config)
        checkpoint_activations(model.model.layers, each)
        words = torch.arange(16).reshape(2, 8)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    (loss, plain), (repeated_loss, repeated) = found
    assert loss == repeated_loss
    torch.testing.assert_close(repeated, plain)


def test_nothing_is_repeated_without_gradients() -> None:
    module = Counting()
    checkpoint_activations([module], "full")
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert module.num_forwards == 1


def test_restored_modules_have_their_own_class() -> None:
    module, _ = gradients("full")
    restore_activations(module)
    assert type(module) is Counting


def test_a_module_is_checkpointed_once() -> None:
    module, _ = gradients("full")
    with pytest.raises(ValueError, match="Counting already checkpoints its activations"):
        checkpoint_activations([module], "full")


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_forward_keeps_its_signature(kind: str) -> None:
    model = Counting()
    before = signature(model.forward)
    checkpoint_activations([model], kind)
    assert signature(model.forward) == before
