"""Stand-ins of optimizers and schedules, wrappers, and the plugin in use, held against the installed ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from drivetrain_accelerate.plugins.deepspeed_objects import (
    DummyOptim,
    DummyScheduler,
    check_said_once,
    get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed,
    optimizer_for,
    scheduler_for,
)
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.option_fields import TranslationError
from drivetrain_accelerate.training.engine_model import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from optional_modules import skip_without

pytest.importorskip("accelerate")
from accelerate.utils import deepspeed as real


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(2, 2).parameters())


def test_stand_ins_hold_what_the_real_ones_hold() -> None:
    params = parameters()
    ours, theirs = (kind(params, lr=2, weight_decay=3, foo=1) for kind in (DummyOptim, real.DummyOptim))
    assert vars(ours) == vars(theirs)
    for given in ({"total_num_steps": 3, "foo": 2}, {"lr_scheduler_callable": len}):
        assert vars(DummyScheduler(ours, **given)) == vars(real.DummyScheduler(ours, **given))


def test_an_optimizer_is_made_from_the_section() -> None:
    def made(kind: str, **params: Any) -> Any:
        stand_in = DummyOptim(parameters(), lr=0.5, weight_decay=0.25)
        return optimizer_for(stand_in, {"optimizer": {"type": kind, "params": params}})

    adam = made("AdamW", lr="auto", weight_decay="auto", betas=[0.8, 0.9])
    assert type(adam) is AdamW
    assert (adam.defaults["lr"], adam.defaults["weight_decay"], adam.defaults["betas"]) == (
        0.5,
        0.25,
        (0.8, 0.9),
    )
    assert made("AdamW", lr=0.1).defaults["lr"] == 0.1
    assert type(made("Adam")) is AdamW
    assert type(made("Adam", adam_w_mode=False)) is Adam
    assert type(made("sgd")) is SGD
    with pytest.raises(TranslationError, match=r"optimizer\.type='OneBitAdam'"):
        made("OneBitAdam")


def test_a_schedule_is_made_from_the_section_or_by_the_function() -> None:
    skip_without("deepspeed")
    optimizer = SGD(parameters(), lr=0.5)
    stand_in = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=4)
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    section = {"type": "WarmupDecayLR", "params": {**dict.fromkeys(names, "auto"), "warmup_type": "linear"}}
    schedule: Any = scheduler_for(stand_in, optimizer, {"scheduler": section})
    rates = []
    for _ in range(10):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) == 0.5
    assert rates[-1] < rates[5]
    own = DummyScheduler(optimizer, lr_scheduler_callable=lambda given: StepLR(given, 1))
    assert isinstance(scheduler_for(own, optimizer, {}), StepLR)
    with pytest.raises(TranslationError, match=r"scheduler\.type='Other'"):
        scheduler_for(stand_in, optimizer, {"scheduler": {"type": "Other"}})


def test_what_a_section_says_is_not_said_twice() -> None:
    optimizer = SGD(parameters(), lr=0.5)
    config: dict[str, Any] = {"optimizer": {"type": "SGD"}}
    check_said_once(config, optimizers=[DummyOptim(parameters())], schedulers=[StepLR(optimizer, 1)])
    check_said_once({}, optimizers=[optimizer], schedulers=[])
    own = DummyScheduler(optimizer, lr_scheduler_callable=len)
    check_said_once({}, optimizers=[], schedulers=[own])
    with pytest.raises(ValueError, match="has a section optimizer, and a SGD is prepared"):
        check_said_once(config, optimizers=[optimizer], schedulers=[])
    with pytest.raises(ValueError, match="DummyScheduler stands for the section scheduler"):
        check_said_once({}, optimizers=[], schedulers=[DummyScheduler(optimizer)])


def test_the_plugin_in_use() -> None:
    state = SimpleNamespace(distributed_type=DistributedType.NO, deepspeed_plugins=None)
    with pytest.raises(ValueError, match="no plugin of DeepSpeed is in use"):
        get_active_deepspeed_plugin(state)
    state.distributed_type = DistributedType.DEEPSPEED
    state.deepspeed_plugins = one = DeepSpeedPlugin()
    assert get_active_deepspeed_plugin(state) is one
    state.deepspeed_plugins = {"one": one, "other": DeepSpeedPlugin()}
    with pytest.raises(ValueError, match="none of the plugins one, other is chosen"):
        get_active_deepspeed_plugin(state)
    one.select(_from_accelerator_state=True)
    assert get_active_deepspeed_plugin(state) is one


@pytest.mark.slow
def test_adam_is_mapped_to_deepspeeds_and_others_are_refused() -> None:
    skip_without("deepspeed")
    for kind in (AdamW, Adam):
        mapped = map_pytorch_optim_to_deepspeed(kind(parameters(), lr=0.1))
        assert type(mapped).__name__ == "DeepSpeedCPUAdam"
        assert mapped.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="no optimizer on the CPU that computes as SGD"):
        map_pytorch_optim_to_deepspeed(SGD(parameters(), lr=0.1))


class Engine:
    """What of DeepSpeed's engine the wrapper calls, recorded."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(is_boundary)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.calls.append(("backward", options))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(2.0)


@pytest.mark.parametrize("syncs", [True, False])
def test_the_wrapped_engine_steps_at_the_end_of_a_window(syncs: bool) -> None:
    calls = []
    for kind in (DeepSpeedEngineWrapper, real.DeepSpeedEngineWrapper):
        engine = Engine()
        kind(engine).backward(torch.zeros(()), sync_gradients=syncs, retain_graph=True)
        calls.append(engine.calls)
        assert kind(engine).get_global_grad_norm() == 2.0
    assert calls[0] == calls[1]


def test_wrapped_optimizers_and_schedules_leave_stepping_to_the_engine() -> None:
    optimizer = SGD(parameters(), lr=0.5)
    wrapped = DeepSpeedOptimizerWrapper(optimizer)
    before = [each.clone() for each in optimizer.param_groups[0]["params"]]
    for each in optimizer.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    wrapped.step()
    wrapped.zero_grad()
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    assert not wrapped.step_was_skipped
    optimizer.overflow = True  # pyright: ignore[reportAttributeAccessIssue] as DeepSpeed's has
    assert wrapped.step_was_skipped
    assert wrapped.state_dict() == optimizer.state_dict()
    schedule = DeepSpeedSchedulerWrapper(StepLR(optimizer, 1, gamma=0.1), optimizer)
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
