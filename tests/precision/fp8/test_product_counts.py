import threading

import pytest
import torch
from torch import nn

from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model
from drivetrain_precision.fp8.product_counts import ProductCounts, counting_products


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))


def counts(model: nn.Module, rows: int = 5) -> ProductCounts:
    with counting_products() as found:
        model(torch.randn(rows, 32)).sum().backward()
    return found


def test_a_plain_layer_has_three_products_but_the_first_no_gradient_of_its_input() -> None:
    assert counts(net()) == ProductCounts(scaled=0, others=8, is_counted=True)


@pytest.mark.parametrize(
    ("scaling", "scaled"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2), ("mxfp8", 0)]
)
def test_the_products_of_converted_layers_are_told_apart(scaling, scaled: int) -> None:
    model = net()
    assert convert_model(model, TorchaoRecipe(scaling=scaling)).converted == ("1",)
    assert counts(model) == ProductCounts(scaled=scaled, others=8 - scaled, is_counted=True)


def test_attention_and_batched_products_are_among_the_others() -> None:
    with counting_products() as found:
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
        torch.ones(3, 4) @ torch.ones(4, 5)
        torch.ones(2, 3, 4) @ torch.ones(2, 4, 5)
    assert found.others == 3


def test_attention_kernels_are_no_products_in_8_bits() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    with counting_products() as counts:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert counts.scaled == 0


def test_while_another_profiler_records_nothing_is_counted_and_the_other_keeps_its_records() -> None:
    with torch.profiler.profile() as other:
        found = counts(net())
    assert (found.scaled, found.others, found.is_counted) == (0, 0, False)
    assert "another profiler recorded" in found.hindrance
    assert any(event.key == "aten::addmm" for event in other.key_averages())
    assert counts(net()).is_counted


def test_a_block_that_raises_ends_the_recording() -> None:
    with pytest.raises(ValueError, match="stop"), counting_products():
        raise ValueError("stop")
    assert counts(net()).is_counted


def test_products_of_other_threads_are_not_counted() -> None:
    thread = threading.Thread(target=lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    with counting_products() as found:
        thread.start()
        thread.join()
    assert (found.scaled, found.others) == (0, 0)


def test_a_recording_that_begins_within_an_operation_counts_what_follows() -> None:
    class Within(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with counting_products() as Within.found:
                torch.ones(3, 4) @ torch.ones(4, 5)
            return gradient

    Within.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert Within.found.others == 1


@pytest.mark.slow
def test_a_step_in_which_something_is_compiled_is_not_counted_and_the_next_one_is() -> None:
    model = net()
    convert_model(model, TorchaoRecipe(scaling="tensorwise"))
    expected = counts(model, rows=16)
    torch.compiler.reset()  # earlier tests may have reached the limit of recompilations
    fast = torch.compile(model, backend="aot_eager")
    first = counts(fast, rows=16)
    assert not first.is_counted
    assert "torch.compile was compiling" in first.hindrance
    found = counts(fast, rows=16)
    assert (found.is_counted, found.scaled, found.compiled) == (True, expected.scaled, 2)
    assert expected.compiled == 0


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_compiled_model_counts_as_many_products_and_gives_the_same_losses(scaling) -> None:
    plain, compiled = net(), net()
    recipe = TorchaoRecipe(scaling=scaling, layers=LayerFilter())
    for model in (plain, compiled):
        convert_model(model, recipe)
    expected = counts(plain, rows=16)
    torch.compiler.reset()  # earlier tests may have reached the limit of recompilations
    fast = torch.compile(compiled)
    fast(torch.randn(16, 32)).sum().backward()
    found = counts(fast, rows=16)
    assert found.scaled == expected.scaled
    assert found.compiled == 2  # forward and backward
    assert expected.compiled == 0
    rows = torch.randn(16, 32)
    torch.testing.assert_close(fast(rows), plain(rows), rtol=0.02, atol=0.02)
