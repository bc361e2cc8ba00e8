"""What is released is free when the call returns: by weak references and by the bytes of a process of its own."""

import gc
import json
import platform
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain_memory import clear_device_cache, free_memory, release_memory
from processes import environment_alone


@pytest.fixture(scope="module")
def drill(python: str) -> list[dict[str, float]]:
    script = Path(__file__).with_name("freeing_drill.py")
    names = ("freed_by_training", "ended_workers", "freed_compiled")
    done = subprocess.run(
        [python, script, *names], env=environment_alone(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells of its heap")
def test_model_optimizer_and_graphs_are_freed_to_the_system(drill: list[dict[str, float]]) -> None:
    assert drill[0]["held"] > 50
    assert drill[0]["left"] < 4
    assert drill[0]["resident"] < 8
    assert drill[0]["alive"] == 0


def test_persistent_workers_end(drill: list[dict[str, float]]) -> None:
    assert drill[1] == {"before": 1, "after": 0}


def test_compiled_code_lets_go_of_its_model(drill: list[dict[str, float]]) -> None:
    assert drill[2]["alive"] == 0
    assert drill[2]["freed"] > 0.9


def test_garbage_in_cycles_goes() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    try:
        one = Cycle()
        seen = weakref.ref(one)
        del one
        assert free_memory() == []
        assert seen() is None
    finally:
        gc.enable()


def test_objects_are_empty_before_the_callers_names_go() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    held = [torch.ones(3)]
    assert release_memory(model, optimizer, loss, held) == [None] * 4
    assert (model.weight.numel(), model.weight.grad, len(optimizer.state), loss.grad_fn) == (0, None, 0, None)
    assert held == []


@pytest.mark.slow
def test_what_another_model_or_optimizer_uses_keeps_its_values() -> None:
    base, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = base.weight
    release_memory(head)
    assert base.weight.shape == (4, 4)
    assert head.bias.numel() == 0
    both = torch.optim.SGD([*base.parameters()], lr=0.1)
    release_memory(both)
    assert base.weight.shape == (4, 4)


def test_other_objects_are_left_alone() -> None:
    loader = DataLoader(torch.arange(3))
    assert release_memory(1, "a", loader) == [None, None, None]
    assert len(list(loader)) == 3


@pytest.mark.parametrize("garbage_collection", [False, True])
def test_the_cache_is_cleared_with_garbage_or_without(garbage_collection: bool) -> None:
    assert clear_device_cache(garbage_collection) is None
