"""Weights that the host uses in their files: which of their pages are in this process's memory, and their values."""

import copy
import time
from pathlib import Path
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dispatch.models import KINDS, WIDTH, Tree, run_threads, same_values, trees
from dispatch.offload.test_pages import resident
from drivetrain_dispatch import disk_offload, dispatch_model, remove_hooks
from drivetrain_dispatch.offload import mapped_weights as in_place
from drivetrain_dispatch.offload.execution_order import ExecutionOrder
from drivetrain_dispatch.offload.pages import (
    MappedPart,
    PageLimits,
    PageReader,
    Pages,
    can_release,
    some_missing,
)
from drivetrain_weights import MappedFile

LARGE = 256  # a layer of it is 64 pages

pytestmark = pytest.mark.skipif(not can_release(), reason="asks Linux which pages were written to")


def layers(num: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(LARGE, LARGE, bias=False) for _ in range(num)))


def num_resident(model: nn.Module) -> int:
    return sum(resident(parameter) for parameter in model.parameters())


def is_there(layer: nn.Module) -> bool:
    """Whether a layer is; the system maps pages around those that are used too."""
    return resident(layer.weight) > 32


def test_pages_leave_behind_the_forward_if_asked_for(tmp_path: Path) -> None:
    model, x = layers(), torch.randn(2, LARGE)
    expected, during = model(x), []
    disk_offload(model, tmp_path, release_pages=True)
    for layer in model:
        layer.register_forward_hook(lambda *_: during.append(num_resident(model)))
    for _ in range(3):
        assert torch.equal(model(x), expected)
        assert num_resident(model) == 0
    assert max(during) <= 4 * 64  # what is used, what was, and what the system maps around them
    remove_hooks(model)
    assert torch.equal(model(x), expected)
    assert num_resident(model) >= 8 * 64


@pytest.mark.undisturbed
def test_the_system_is_asked_seldom_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, began, took = disk_offload(layers(), tmp_path), list[float](), list[float]()
    model(torch.randn(2, LARGE))  # all pages are there now

    def slow(pages: Pages) -> bool:
        began.append(time.perf_counter())
        time.sleep(0.01)
        missing = some_missing(pages)
        took.append(time.perf_counter() - began[-1])
        return missing

    monkeypatch.setattr(in_place, "some_missing", slow)
    deadline = time.perf_counter() + 60
    while not began and time.perf_counter() < deadline:  # soon: the check before took microseconds
        model(torch.randn(2, LARGE))
    num_asked, seconds = len(began), sum(took)
    assert num_asked > 0
    while len(began) == num_asked and time.perf_counter() < deadline:
        model(torch.randn(2, LARGE))
    assert len(began) == 2 * num_asked
    assert began[num_asked] - began[0] >= 50 * seconds  # a fiftieth of the time may go to the question


def test_pages_stay_if_nothing_is_said(tmp_path: Path) -> None:
    model = disk_offload(layers(), tmp_path)
    model(torch.randn(2, LARGE))
    assert num_resident(model) >= 8 * 64


def test_pages_leave_after_a_forward_that_fails(tmp_path: Path) -> None:
    model = disk_offload(layers(), tmp_path, release_pages=True)
    model[5].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, LARGE))
    assert num_resident(model) == 0


@settings(max_examples=25, deadline=None)
@given(tree=trees, data=st.data())
def test_training_is_the_same_with_pages_that_leave(
    tree: Tree, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What an optimizer writes is in no file, and stays."""
    folder = tmp_path_factory.mktemp("weights")
    write_back = data.draw(st.booleans())
    plain = copy.deepcopy(tree)
    disk_offload(tree, folder, write_back=write_back, release_pages=True)
    models, batches = (plain, tree), torch.randn(3, 4, WIDTH)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for batch in batches:
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(1)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same_values(tree.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_writes_stays(kind: str, tmp_path: Path) -> None:
    """As a norm does with its running statistics."""
    model = nn.Sequential(KINDS[kind](), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, offload_buffers=True, release_pages=True)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        for one in (plain, model):
            torch.manual_seed(1)
            one(x)
    assert same_values(model.state_dict(), plain.state_dict())


def test_two_threads_may_use_one_model(tmp_path: Path) -> None:
    model, batches = layers(), torch.randn(2, 4, LARGE)
    expected = [model(batch) for batch in batches]
    disk_offload(model, tmp_path, release_pages=True)
    results: list[list[Tensor]] = [[], []]

    def use(index: int) -> None:
        results[index] = [model(batches[index]) for _ in range(20)]

    run_threads(use, 2)
    for index, result in enumerate(results):
        assert len(result) == 20
        assert all(torch.equal(one, expected[index]) for one in result)


def test_weights_that_were_converted_are_left_alone(tmp_path: Path) -> None:
    model = disk_offload(layers(), tmp_path, release_pages=True).double()
    x = torch.randn(2, LARGE, dtype=torch.float64)
    expected = model(x)
    assert torch.equal(model(x), expected)
    assert num_resident(model) >= 8 * 128


class TestAHostWithoutRoom:
    """What stays is what is used first; the others leave, also the system's cache."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> nn.Sequential:
        return disk_offload(layers(), tmp_path)

    def reading(self, model: nn.Sequential, folder: Path, order: list[int], limits: PageLimits) -> PageReader:
        file = MappedFile(next(folder.iterdir()))
        stretches = [[MappedPart(Pages.of(layer.weight), file, ref(layer.weight))] for layer in model]
        return PageReader(list(model), stretches, ExecutionOrder(order), limits, reads=True)

    def test_the_first_ones_stay(self, model: nn.Sequential, tmp_path: Path) -> None:
        size_bytes = model[0].weight.nbytes
        reading = self.reading(
            model, tmp_path, list(range(8)), PageLimits(2 * size_bytes, 3 * size_bytes + 4096)
        )
        model(torch.randn(2, LARGE))
        reading.stop()
        assert [is_there(layer) for layer in model] == [True] * 3 + [False] * 5

    @pytest.mark.undisturbed  # the system decides when pages leave
    def test_what_is_used_again_stays_until_then(self, model: nn.Sequential, tmp_path: Path) -> None:
        size_bytes, here = model[0].weight.nbytes, []
        reading = self.reading(
            model, tmp_path, [0, 1, 2, 0, 3], PageLimits(2 * size_bytes, 0, leaves_cache=True)
        )
        x = torch.randn(2, LARGE)
        for index in (0, 1, 2, 0, 3):
            model[index](x)
            here.append([is_there(layer) for layer in list(model)[:3]])
        reading.stop()
        assert [step[0] for step in here] == [True, True, True, True, False]
        assert here[3][1:] == [False, False]
        assert num_resident(model) == 0
