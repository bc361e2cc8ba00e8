"""Hooks of modules, held against those of the installed Accelerate."""

import copy
import pickle
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import align_devices, module_hooks

theirs = pytest.importorskip("accelerate.hooks")


class Ours(ModuleType):
    """Our rooms as one module, as the interface shows them."""

    def __getattr__(self, name: str) -> Any:
        rooms = (module_hooks, align_devices)
        return next(getattr(room, name) for room in rooms if hasattr(room, name))


ours = Ours("hooks")
both = pytest.mark.parametrize("hooks", [pytest.param(ours, id="ours"), pytest.param(theirs, id="theirs")])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    rest = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    parts: Any = OrderedDict(first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), rest=rest)
    return nn.Sequential(parts).eval()


def logged(hooks: Any) -> list[str]:
    """The calls of hooks that are added, appended, replaced and removed."""
    calls: list[str] = []

    class Noting(hooks.ModelHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"pre {self.name}")
            return (args[0] + 1,), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            calls.append(f"post {self.name}")
            return output * 2

        def init_hook(self, module: nn.Module, what: str = "init") -> nn.Module:
            calls.append(f"{what} {self.name}")
            return module

        def detach_hook(self, module: nn.Module) -> nn.Module:
            return self.init_hook(module, "detach")

    layer: Any = nn.Identity()
    forward = layer.forward
    assert hooks.add_hook_to_module(layer, Noting("one")) is layer
    hooks.add_hook_to_module(layer, Noting("two"))
    hooks.add_hook_to_module(layer, Noting("three"), append=True)
    calls.append(f"{layer(torch.ones(1))} {type(layer._hf_hook).__name__} {layer._old_forward == forward}")
    copied: Any = copy.deepcopy(layer)
    calls.append(f"{copied(torch.zeros(1))} {copied.forward.args[0] is copied}")
    hooks.remove_hook_from_module(layer)
    calls.append(f"{layer(torch.ones(1))} {hasattr(layer, '_hf_hook')} {hasattr(layer, '_old_forward')}")
    hooks.add_hook_to_module(layer, Noting("four"), append=True)
    hooks.remove_hook_from_submodules(nn.Sequential(layer))
    return calls


def test_hooks_run_in_the_same_order() -> None:
    mine = logged(ours)
    assert mine[:3] == ["init one", "detach one", "init two"]
    # Accelerate forgets a hook that is replaced, and with it the weights that it keeps.
    mine.remove("detach one")
    assert mine == logged(theirs)
    layer = ours.add_hook_to_module(nn.Linear(2, 2), ours.AlignDevicesHook("cpu", offload=True))
    assert layer.weight.is_meta
    ours.add_hook_to_module(layer, ours.ModelHook())
    assert not layer.weight.is_meta


@both
def test_a_hook_may_turn_gradients_off_and_cast_weights(hooks: Any) -> None:
    hook = hooks.ModelHook()
    hook.no_grad = True
    layer = hooks.add_hook_to_module(nn.Linear(2, 2), hook)
    assert not layer(torch.ones(1, 2)).requires_grad
    stored, computed = torch.float8_e4m3fn, torch.bfloat16
    layer = nn.Linear(4, 4).bfloat16()
    hooks.add_hook_to_module(layer, hooks.LayerwiseCastingHook(stored, computed, False))
    assert layer.weight.dtype == stored
    assert layer(torch.ones(1, 4).bfloat16()).dtype == computed
    assert layer.weight.dtype == stored


def test_a_module_with_a_hook_is_pickled() -> None:
    layer = ours.add_hook_to_module(nn.Linear(2, 2), ours.AlignDevicesHook(io_same_device=True))
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(torch.ones(1, 2)), layer(torch.ones(1, 2)))
    ours.remove_hook_from_module(layer)
    assert "forward" not in vars(layer)


def shown(module: nn.Module) -> dict[str, str]:
    return {name: repr(getattr(each, "_hf_hook", None)) for name, each in module.named_modules()}


def state(module: nn.Module) -> dict[str, tuple[str, str]]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: (str(tensor.device), str(tensor.dtype)) for name, tensor in tensors}


EACH, BLOCKS, ALONE = (
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
)
CPU: dict[str, Any] = {"execution_device": "cpu"}
NAMES = ("first", "norm", "rest")
ATTACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "offload": (EACH, {**CPU, "offload": True}),
    "offload buffers": (EACH, {**CPU, "offload": True, "offload_buffers": True}),
    "align": (EACH, CPU),
    "preload": (EACH, {**CPU, "offload": True, "preload_module_classes": ["Sequential"]}),
    "map": (EACH, {**CPU, "offload": True, "offload_buffers": True, "weights_map": model().state_dict()}),
    "execution": (ALONE, CPU),
    "execution preload": (ALONE, {**CPU, "preload_module_classes": ["Sequential"]}),
    "one block": (BLOCKS, CPU),
    "all blocks": (BLOCKS, {**CPU, "offload": True}),
    "blocks": (
        BLOCKS,
        {
            "execution_device": dict.fromkeys(("", "first", "norm", "rest.0", "rest.1"), "cpu"),
            "offload": {"first": False, "norm": False, "rest.0": True, "rest.1": False},
        },
    ),
    "offloaded blocks": (
        BLOCKS,
        {"execution_device": dict.fromkeys(NAMES, "cpu"), "offload": dict.fromkeys(NAMES, True)},
    ),
    "offloaded whole": (BLOCKS, {"execution_device": {"": "cpu"}, "offload": {"": True}}),
}


@pytest.mark.parametrize("way", ATTACHED)
def test_modules_get_the_same_hooks_and_compute_the_same(way: str) -> None:
    mine, real, plain = model(), model(), model()
    function, options = ATTACHED[way]
    getattr(ours, function)(mine, **options)
    getattr(theirs, function)(real, **options)
    assert shown(mine) == shown(real)
    assert state(mine) == state(real)
    x = torch.ones(2, 4)
    for _ in range(2):
        assert torch.equal(mine(x), plain(x))
    ours.remove_hook_from_submodules(mine)
    theirs.remove_hook_from_submodules(real)
    assert state(mine) == state(real)
    assert shown(mine) == shown(real)


@pytest.mark.parametrize("pattern", [None, ("rest",), ("^first$", r"1\.0"), ("norm",)])
@pytest.mark.parametrize("classes", [None, (nn.Sequential,)])
def test_the_same_layers_are_cast(pattern: Any, classes: Any) -> None:
    real_attach = pytest.importorskip("accelerate.big_modeling").attach_layerwise_casting_hooks
    mine, real = model(), model()
    for attach, each in ((module_hooks.attach_layerwise_casting_hooks, mine), (real_attach, real)):
        attach(each, torch.float8_e4m3fn, torch.float32, pattern, classes)
    assert state(mine) == state(real)
    assert torch.equal(mine(torch.ones(2, 4)), real(torch.ones(2, 4)))


def test_a_pattern_that_is_a_string_is_one_pattern() -> None:
    """Accelerate takes each of its letters for one."""
    cast: Any = model()
    module_hooks.attach_layerwise_casting_hooks(cast, torch.float8_e4m3fn, torch.float32, "rest")
    assert cast.first.weight.dtype == torch.float8_e4m3fn
    assert cast.rest[0].weight.dtype == torch.float32


def test_a_model_is_moved_when_it_is_called_and_back_by_the_next() -> None:
    first, hook = module_hooks.cpu_offload_with_hook(nn.Linear(2, 2), "meta")
    second, _ = module_hooks.cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=None)
    assert hook.model is first
    assert isinstance(first._hf_hook, module_hooks.CpuOffload)
    assert first(torch.ones(1, 2)).is_meta
    hook.remove()
    assert not hasattr(first, "_hf_hook")
    assert second(torch.ones(1, 2)).shape == (1, 2)


def test_items_that_are_to_stay_do() -> None:
    """In arguments and in outputs of libraries, whose class stays."""

    class Output(dict[str, Any]):
        pass

    given = Output(moved=torch.ones(1), kept=torch.ones(1))
    for value in (given, dict(given)):
        sent = align_devices.move_except(value, torch.device("meta"), ["kept"])
        assert type(sent) is type(value)
        assert sent["moved"].is_meta
        assert sent["kept"] is given["kept"]
        assert align_devices.move_except(value, torch.device("cpu"), ["kept"])["moved"] is given["moved"]
