"""A dispatched model is freed when the last reference to it goes, as a plain one is: the collector is off here."""

import contextlib
import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import (
    KINDS,
    WIDTH,
    Checkpointed,
    CheckpointedBlocks,
    Coder,
    Gate,
    Listed,
    Stack,
    streamed,
)
from drivetrain_dispatch import (
    DeviceMapError,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hooks,
)
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.device_transfer import InputMover
from drivetrain_dispatch.offload.transfer import PendingTransfer

THREADS = ("drivetrain-", "load")


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loaded(model: nn.Module, folder: Path) -> nn.Module:
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    with init_empty_weights():
        empty = Stack()
    return load_checkpoint_and_dispatch(empty, folder, {"": "disk"})


WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "plain": lambda model, _: model,
    "copied": lambda model, _: streamed(model),
    "in place": disk_offload,
    "written back": lambda model, folder: disk_offload(model, folder, write_back=True),
    "loaded": loaded,
    "with a hook": lambda model, _: cpu_offload_with_hook(model, "cpu")[0],
}


def parts(model: nn.Module) -> list[weakref.ref[object]]:
    """The model, its modules and all that they hold."""
    found = [*model.modules(), *model.parameters(), *model.buffers()]
    # A tensor's memory outlives its Python object where others hold it.
    memories = [tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]]
    return [weakref.ref(one) for one in [*found, *memories]]


def check_freed(all_parts: list[weakref.ref[object]]) -> None:
    assert [part() for part in all_parts if part() is not None] == []
    end = time.monotonic() + 30
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]:
        assert time.monotonic() < end, left
        time.sleep(0.001)


def forward(model: nn.Module) -> None:
    with torch.inference_mode():
        model(torch.ones(2, WIDTH))


def backward(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()


def failing_forward(model: nn.Module) -> None:
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, WIDTH + 1))


def failing_backward(model: nn.Module) -> None:
    def fail(_gradient: Tensor) -> None:
        raise ValueError("from a hook")

    output = model(torch.ones(2, WIDTH, requires_grad=True))
    output.register_hook(fail)
    with contextlib.suppress(ValueError):
        output.sum().backward()


def removed_and_used(model: nn.Module) -> None:
    forward(model)
    remove_hooks(model)
    forward(model)


USES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda _: None,
    "forward": forward,
    "backward": backward,
    "forward that is not gone back": lambda model: [model(torch.ones(2, WIDTH)), None][1],
    "failing forward": failing_forward,
    "failing backward": failing_backward,
    "removed": remove_hooks,
    "removed and used": removed_and_used,
}
BUILDS = [
    Coder, *KINDS.values(), Checkpointed, lambda: CheckpointedBlocks(use_reentrant=False),
    lambda: CheckpointedBlocks(use_reentrant=True),
]  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_model_is_freed_at_once(
    way: Callable[[nn.Module, Path], nn.Module], use: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    model = way(Stack(), tmp_path / "weights")
    use(model)
    all_parts = parts(model)
    del model
    check_freed(all_parts)


@pytest.mark.parametrize("way", ["plain", "copied", "in place"])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.default_cases("plain")
def test_a_model_of_any_kind_is_freed_at_once(
    way: str, build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = WAYS[way](nn.Sequential(build()), tmp_path)
    backward(model)
    all_parts = parts(model)
    del model
    check_freed(all_parts)


def test_a_map_of_several_places_is_freed_at_once(tmp_path: Path) -> None:
    model = dispatch_model(
        nn.ModuleDict({"gate": Gate(), "list": Listed(), "stack": Stack()}),
        {"gate": "cpu", "list": "disk", "stack": "disk"},
        offload_dir=tmp_path,
        dtypes={"gate.scale": torch.float64},
    )
    all_parts = parts(model)
    del model
    check_freed(all_parts)


def test_a_hook_keeps_no_model() -> None:
    first, first_hook = cpu_offload_with_hook(Coder(), "cpu")
    second, second_hook = cpu_offload_with_hook(Stack(), "cpu", prev_module_hook=first_hook)
    first.encode(torch.ones(1, WIDTH))
    second(torch.ones(1, WIDTH))
    all_parts = parts(first)
    del first
    check_freed(all_parts)
    second(torch.ones(1, WIDTH))  # the one before is gone
    first_hook.offload()
    first_hook.remove()
    second_hook.remove()


def test_a_module_whose_inputs_follow_is_freed_at_once() -> None:
    module = Coder()
    handles = InputMover(torch.device("cpu"), (), returns=True).attach(module)
    module.encode(torch.ones(1, WIDTH))
    all_parts = parts(module)
    del module
    check_freed(all_parts)
    for handle in reversed(handles):
        handle.remove()


def test_a_backward_needs_no_model() -> None:
    model, twin = Stack(), Stack()
    twin.load_state_dict(model.state_dict())
    streamed(model)
    x, other = (torch.ones(2, WIDTH, requires_grad=True) for _ in range(2))
    loss = model(x).sum()
    weight = model.layers[0].weight
    all_parts = parts(model.layers[1])
    del model
    loss.backward()
    twin(other).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(weight.grad, twin.layers[0].weight.grad)
    del loss
    check_freed(all_parts)


def test_a_parameter_that_outlives_its_model_is_an_ordinary_one() -> None:
    model = streamed(Stack())
    expected = model.layers[0].weight.detach().clone()
    forward(model)
    weight = model.layers[0].weight
    del model
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, expected)
    weight.data = torch.zeros(2)
    other = nn.Module()
    other.weight = weight
    streamed(other)


def test_a_part_that_was_replaced_is_left_out() -> None:
    plain = Stack()
    model = streamed(copy.deepcopy(plain))
    plain.layers[2] = model.layers[2] = nn.Linear(WIDTH, WIDTH)
    inputs = torch.ones(1, WIDTH)
    assert torch.equal(model(inputs), plain(inputs))
    remove_hooks(model)
    assert torch.equal(model(inputs), plain(inputs))
    assert type(model.layers[2]) is nn.Linear


def test_a_method_without_its_model_says_so() -> None:
    model = streamed(Stack())
    method = model.forward
    del model
    with pytest.raises(
        OffloadedError, match=r"forward .* after the model was deleted: hold the model itself"
    ):
        method(torch.ones(1, WIDTH))


def test_a_model_that_could_not_be_dispatched_is_freed_at_once() -> None:
    model = Stack()
    with contextlib.suppress(DeviceMapError):
        dispatch_model(model, {"": "disk"})
    all_parts = parts(model)
    del model
    check_freed(all_parts)


def test_weights_that_could_not_come_hold_nothing() -> None:
    """The error knows the frames it went through, and a frame whoever waited."""
    work: Future[object] = Future()
    work.set_exception(MemoryError("of a device"))
    transfer = PendingTransfer(work=work)
    with contextlib.suppress(MemoryError):
        transfer.wait()
    held = weakref.ref(work)
    del work, transfer
    assert held() is None
