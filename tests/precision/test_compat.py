"""Each private name of torch and torchao is what precision relies on: these tests tell when a release changes one."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from drivetrain_precision import compat


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize(("value", "found"), [(4.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_gradients_are_unscaled_in_place_and_a_value_that_is_not_finite_is_found(
    value: float, found: float
) -> None:
    gradients, found_inf = [torch.full((2,), 8.0), torch.tensor([value])], scalar(0.0)
    compat.unscale(gradients, found_inf, scalar(0.25))
    assert gradients[0].tolist() == [2.0, 2.0]
    assert found_inf.item() == found
    compat.unscale([torch.ones(2)], found_inf, scalar(0.25))
    assert found_inf.item() == found  # what was found before stays found


@pytest.mark.parametrize(
    ("tracker", "found", "expected"), [(0, 0.0, (8.0, 1)), (2, 0.0, (16.0, 0)), (2, 1.0, (4.0, 0))]
)
def test_the_scale_grows_after_the_interval_and_falls_after_an_overflow(
    tracker: int, found: float, expected: tuple[float, int]
) -> None:
    scale, growth_tracker = scalar(8.0), torch.tensor(tracker, dtype=torch.int32)
    compat.update_scale(scale, growth_tracker, scalar(found), 2.0, 0.5, 3)
    assert (scale.item(), growth_tracker.item()) == expected


def test_the_hooks_on_an_optimizers_step_are_found() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        assert not compat.has_step_hooks(optimizer)
        handle = getattr(optimizer, register)(lambda *_: None)
        assert compat.has_step_hooks(optimizer)
        handle.remove()
        assert not compat.has_step_hooks(optimizer)


def test_torch_tells_of_bf16_units_as_the_system_does() -> None:
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except FileNotFoundError:
        pytest.skip("this system lists no instructions of its processor")
    assert compat.has_bf16_units() == ("avx512_bf16" in flags)


def test_autocast_names_its_operations_by_device_type() -> None:
    assert "aten::softmax.int" in compat.autocast_names("cuda")
    assert "aten::softmax.int" not in compat.autocast_names("cpu")
    with pytest.raises(RuntimeError, match="AutocastMeta"):
        compat.autocast_names("meta")


def test_the_arguments_of_an_operation_are_those_of_its_schema() -> None:
    arguments = compat.arguments_of(torch.ops.aten.sum.dim_IntList)
    assert arguments == [
        ("self", "Tensor", False, None),
        ("dim", "Optional[List[int]]", False, None),
        ("keepdim", "bool", False, False),
        ("dtype", "Optional[int]", True, None),
    ]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_tensor_without_values_ends_the_call_at_the_first_cast_or_operation(kind: str) -> None:
    tensor = compat.valueless_tensor(torch.float16, kind)
    assert tensor.device.type == kind
    with pytest.raises(compat.CastSeenError) as seen:
        tensor.float()
    assert seen.value.dtypes == {torch.float32}
    with pytest.raises(compat.CastSeenError) as seen:
        torch.sum(tensor, dim=0, dtype=torch.float64)
    assert seen.value.dtypes == {torch.float16, torch.float64}


def test_a_dispatch_mode_sees_operations_below_autocast() -> None:
    seen: list[torch.dtype] = []

    class Watch(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(one.dtype for one in args if isinstance(one, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Watch(), torch.autocast("cpu", torch.bfloat16):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert torch.bfloat16 in seen


def test_backward_runs_below_the_frame_of_the_engine() -> None:
    frames: list[tuple[str, str]] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            frames.extend((one.filename, one.function) for one in inspect.stack(context=0))
            return gradient

    Looks.apply(torch.ones(1, requires_grad=True)).backward()
    assert any(
        file.endswith(compat.ENGINE_FRAME[0]) and name == compat.ENGINE_FRAME[1] for file, name in frames
    )


def test_the_wrapper_of_the_compiler_names_the_model_in_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    compiled = torch.compile(model, backend="eager")
    assert compat.compiler_is_imported()
    assert compat.COMPILED_PREFIX + "0" in dict(compiled.named_modules())


def test_a_backward_is_told_from_what_runs_outside() -> None:
    told: list[bool] = []
    value = torch.ones(2, requires_grad=True)
    value.register_hook(lambda _: told.append(compat.is_in_backward()))
    value.sum().backward()
    assert (compat.is_in_backward(), told) == (False, [True])


def test_an_observers_operations_are_unseen_by_modes() -> None:
    with FlopCounterMode(display=False) as counter, compat.unseen_by_modes():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 0


def test_what_is_compiled_of_a_module_is_told() -> None:
    plain, by_call, by_forward = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    by_call.compile(backend="eager")
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    wrapper = torch.compile(plain, backend="eager")
    told = [compat.compiled_part(module) for module in (plain, by_call, by_forward, wrapper)]
    assert told == [None, "call", "forward", "forward"]


def test_the_values_of_a_sparse_gradient_are_read() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 3])).sum().backward()
    assert layer.weight.grad is not None
    assert compat.values_of_sparse(layer.weight.grad).tolist() == [[1.0, 1.0]] * 2


def test_recorded_operations_say_who_called_them_forward_and_backward() -> None:
    with compat.record_operations() as events:
        x = torch.ones(2, 3, requires_grad=True)
        torch.nn.functional.linear(x, torch.ones(4, 3)).sum().backward()
    assert events is not None
    names = [event.name for event in events]
    assert {"aten::linear", "aten::mm", "aten::sum"} <= set(names)
    linear = events[names.index("aten::linear")]
    assert linear.calls({"aten::mm"}, "none::") or linear.calls({"aten::addmm"}, "none::")
    product = next(
        event
        for event in events
        if (event.name == "aten::mm" and event.caller is linear) or event in linear.called
    )
    assert product.is_called_by("aten::linear")
    assert not linear.is_called_by("aten::")


# Torch 2.11, at the first cycle already.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_operations_are_not_recorded_beside_another_profiler_which_goes_on() -> None:
    with torch.profiler.profile() as other:
        with compat.record_operations() as events:
            torch.ones(2) + 1
        torch.ones(2) * 2
    assert events is None
    assert any(event.key == "aten::mul" for event in other.key_averages())


@pytest.mark.parametrize("plain", [True, False])
def test_torchao_multiplies_in_mxfp8_and_computes_both_gradients(plain: bool) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    torch.manual_seed(0)
    rows, weight = torch.randn(32, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    product = compat.mxfp8_product(
        rows,
        weight,
        kernels=KernelPreference.EMULATED,
        scales=ScaleCalculationMode.RCEIL,
        plain_weight_gradient=plain,
    )
    upstream = torch.randn(32, 96)
    product.backward(upstream)
    expected = (rows @ weight.T, upstream @ weight, upstream.T @ rows)
    assert rows.grad is not None
    assert weight.grad is not None
    errors = [
        ((ours - theirs).norm() / theirs.norm()).item()
        for ours, theirs in zip((product, rows.grad, weight.grad), expected, strict=True)
    ]
    assert all(0 < error < 0.06 for error in errors[:2]), errors
    assert (errors[2] < 1e-6) == plain
