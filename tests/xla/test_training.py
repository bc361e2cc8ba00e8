"""Training through the Accelerator, held against a plain loop, with what it compiles."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_xla import PadTail, compilations_of, masked_sum

pytestmark = pytest.mark.devices(1, 2, 4)
BATCH = 8


def make_data(num_samples: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, num_samples, 6, generator=generator).double())


def make_model(width: int) -> nn.Module:
    """Return a model of a width of its own, since a process compiles each graph once, whichever test comes first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)).double()


def train_plainly(num_epochs: int, width: int) -> tuple[list[float], nn.Module]:
    """Return the losses and the model of a plain loop, whose last batch is short."""
    model = make_model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[float] = []
    for _ in range(num_epochs):
        for x, y in DataLoader(make_data(), batch_size=BATCH):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


def prepare(accelerator: Any, width: int, **loading: Any) -> Any:
    model = make_model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=BATCH, **loading))


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, atol=1e-12, rtol=1e-12)


def test_a_plain_loop_trains_alike_and_names_the_shape_of_its_tail(
    accelerator_on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = accelerator_on()
    model, optimizer, loader = prepare(accelerator, 9)
    losses: list[float] = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    expected, plain = train_plainly(2, 9)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert_same_weights(model, plain)
    found = [(one.step, one.num_graphs, one.cause, one.shapes) for one in compilations_of(model)]
    full, tail = ("0: (8, 6) float64",), ("0: (4, 6) float64",)
    assert found == [(1, 1, "shape", full), (2, 1, "graph", full), (6, 1, "shape", tail)]
    assert "step 6 compiled a graph in" in caplog.text
    assert "for a new shape, 0: (4, 6) float64" in caplog.text


def test_a_padded_tail_compiles_nothing_and_trains_as_the_short_one(accelerator_on: Any) -> None:
    accelerator = accelerator_on()
    model, optimizer, loader = prepare(accelerator, 10, collate_fn=PadTail(BATCH))
    losses: list[float] = []
    rows: list[Tensor] = []
    for _ in range(3):
        for x, y, mask in loader:
            with accelerator.accumulate(model):
                loss, count = masked_sum((model(x) - y).square(), mask)
                accelerator.backward(loss, count=count)
                optimizer.step()
                optimizer.zero_grad()
            losses.append((loss / count).item())
            rows.append(accelerator.gather_for_metrics(y).cpu())
    expected, plain = train_plainly(3, 10)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert_same_weights(model, plain)
    assert [len(one) for one in rows[:6]] == [8, 8, 8, 8, 8, 4]
    torch.testing.assert_close(torch.cat(rows[:6]), make_data().tensors[1])
    found = [(one.step, one.cause) for one in compilations_of(model)]
    # The first steps, whose counts are divided otherwise; the quotient; and the rows that metrics keep of the tail.
    assert {cause for step, cause in found if step > 3} == {"between"}
    assert max(step for step, _ in found) <= len(loader)
    assert ("0: (8, 6) float64",) in {one.shapes for one in compilations_of(model)}


def test_a_value_read_inside_a_step_is_named(accelerator_on: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = accelerator_on()
    model, optimizer, loader = prepare(accelerator, 11, drop_last=True)
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            if step == 3:
                assert loss.item() > 0
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    causes = [(one.step, one.cause) for one in compilations_of(model)]
    assert (4, "read") in causes
    assert "for a value that was read inside a step" in caplog.text


def test_a_window_ends_a_graph_for_each_micro_batch(accelerator_on: Any) -> None:
    import torch_xla.debug.metrics as metrics

    accelerator = accelerator_on(gradient_accumulation_steps=3)
    model, optimizer, loader = prepare(accelerator, 12, drop_last=True)
    before = metrics.counter_value("MarkStep") or 0
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert len(loader) == 5  # windows of three and two
    assert metrics.counter_value("MarkStep") - before == 5


def test_the_learning_rate_of_a_schedule_and_a_clip_compile_nothing(accelerator_on: Any) -> None:
    accelerator = accelerator_on()
    model, optimizer, loader = prepare(accelerator, 13, drop_last=True)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert [one.step for one in compilations_of(model)] == [1, 2]


def test_a_norm_of_a_nan_is_a_nan_whatever_its_type(accelerator_on: Any) -> None:
    accelerator = accelerator_on()
    model, optimizer, _ = prepare(accelerator, 16)
    for norm_type in (2.0, torch.inf):
        with accelerator.accumulate(model):
            x = torch.tensor([[torch.nan, 1, 1, 1, 1, 1]], dtype=torch.float64)
            accelerator.backward(model(x.to(accelerator.device)).mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
            assert norm.isnan().item(), norm_type
            optimizer.zero_grad()


def test_a_batch_of_an_evaluation_ends_the_graph_of_the_one_before(accelerator_on: Any) -> None:
    import torch_xla.debug.metrics as metrics

    accelerator = accelerator_on()
    model, _, loader = prepare(accelerator, 14, drop_last=True)
    before, total = (
        metrics.counter_value("MarkStep") or 0,
        torch.zeros((), dtype=torch.float64, device=accelerator.device),
    )
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            total += (model(x) - y).square().mean()
    assert metrics.counter_value("MarkStep") - before == len(loader) - 1
    expected = make_model(14)(make_data().tensors[0][:40]) - make_data().tensors[1][:40]
    assert total.item() / len(loader) == pytest.approx(expected.square().mean().item(), abs=1e-12)


def test_weights_are_exported_from_the_host(accelerator_on: Any) -> None:
    accelerator = accelerator_on()
    model, *_ = prepare(accelerator, 15)
    state = accelerator.get_state_dict(model)
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert_same_weights(model, make_model(15))


def test_an_optimizer_with_states_is_prepared(accelerator_on: Any) -> None:
    model = make_model(20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = make_data().tensors[0]
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    other = deepcopy(model), deepcopy(optimizer)
    accelerator = accelerator_on()
    parameters = list(model.parameters())
    prepared, stepping = accelerator.prepare(model, optimizer)
    assert all(one is two for one, two in zip(parameters, model.parameters(), strict=True))
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(data.to(accelerator.device)).square().mean())
        stepping.step()
    plain, same = other
    stepping_plainly = torch.optim.AdamW(plain.parameters(), lr=0.05)
    stepping_plainly.load_state_dict(same.state_dict())
    plain(data).square().mean().backward()
    stepping_plainly.step()
    assert_same_weights(prepared, plain)


def test_blocks_that_would_be_computed_again_are_refused(accelerator_on: Any) -> None:
    accelerator = accelerator_on(model={"activation_checkpointing": "full"})
    with pytest.raises(ValueError, match="torch cannot compute blocks again on an XLA device"):
        accelerator.prepare(make_model(19))
