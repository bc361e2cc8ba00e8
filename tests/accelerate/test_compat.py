"""Each private name is what this package relies on: these tests tell when a new release changes one."""

from operator import add
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from drivetrain_accelerate import compat


def test_a_function_is_applied_to_the_leaves_of_nested_values() -> None:
    assert compat.map_nested(add, {"x": [1, (2,)]}, {"x": [10, (20,)]}) == {"x": [11, (22,)]}


def test_calls_of_a_scheduler_are_counted() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1)
    made = compat.num_calls(scheduler)
    optimizer.step()
    scheduler.step()
    assert compat.num_calls(scheduler) == made + 1
    rates = scheduler.get_last_lr()
    compat.count_call(scheduler)
    assert compat.num_calls(scheduler) == made + 2
    assert scheduler.get_last_lr() == rates


def test_names_of_tied_weights_are_declared_by_the_model() -> None:
    transformers: Any = pytest.importorskip("transformers", reason="its models declare the names")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.BertForMaskedLM(config)
    assert "cls.predictions.decoder.weight" in set(compat.tied_weights_keys(model) or ())
    assert compat.tied_weights_keys(nn.Linear(2, 2)) is None
