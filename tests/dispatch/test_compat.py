"""Each private name of torch is what dispatch relies on: these tests tell when a new torch changes one."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain_dispatch import compat


class Operations(compat.TorchDispatchMode):
    """A mode that notes every operation under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(Tensor):
    """A tensor that notes every function called with it."""

    seen: list[Callable[..., Any]] = []  # noqa: RUF012 emptied by the test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A tensor around others, which runs no operation itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_each_write_in_place_raises_the_version_and_no_read_does() -> None:
    tensor = torch.ones(3)
    before = compat.version_of(tensor)
    tensor.sum()
    assert compat.version_of(tensor) == before
    tensor.detach().mul_(2)  # shares the count
    tensor[0] = 1
    assert compat.version_of(tensor) == before + 2
    tensor.data.mul_(2)  # does not
    assert compat.version_of(tensor) == before + 2


def test_reading_the_version_of_a_subclass_calls_its_torch_function_with_the_named_function() -> None:
    tensor = torch.ones(3).as_subclass(Functions)
    Functions.seen.clear()
    compat.version_of(tensor)
    assert Functions.seen == [compat.READ_VERSION]


def test_without_torch_function_a_subclass_is_a_tensor() -> None:
    tensor = torch.ones(3).as_subclass(Functions)
    Functions.seen.clear()
    with compat.without_torch_function():
        assert (tensor + 1).tolist() == [2.0] * 3
    assert Functions.seen == []


def test_a_callback_runs_once_when_its_backward_is_over() -> None:
    order: list[str] = []
    tensor = torch.ones(3, requires_grad=True)
    middle = tensor * 2
    middle.register_hook(lambda _: compat.call_after_backward(lambda: order.append("over")))
    tensor.register_hook(lambda _: order.append("last gradient"))
    middle.sum().backward()
    assert order == ["last gradient", "over"]


def test_a_callback_outside_a_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="during backward"):
        compat.call_after_backward(lambda: None)


def test_a_wrapper_reports_shape_dtype_and_device_and_has_no_memory() -> None:
    made = compat.make_wrapper(Wrapper, (2, 3), dtype=torch.bfloat16, device="cpu", requires_grad=False)
    assert type(made) is Wrapper
    assert (made.shape, made.dtype, made.device) == ((2, 3), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="data pointer"):
        made.untyped_storage().data_ptr()


def test_operations_tell_whether_they_write_and_a_conversion_is_one_operation() -> None:
    tensor = torch.ones(3)
    with Operations() as operations:
        tensor.to(torch.float64)
        tensor.mul_(2)
    converted, written = operations.seen
    assert converted is compat.TO_COPY
    assert [compat.is_write(converted), compat.is_write(written)] == [False, True]


def test_a_grouped_product_is_one_operation_of_the_known_name() -> None:
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has no public one
    rows, matrices = (torch.ones(shape, device="meta", dtype=torch.bfloat16) for shape in ((4, 8), (2, 8, 8)))
    ends = torch.empty(2, device="meta", dtype=torch.int32)
    with Operations() as operations:
        multiply(rows, matrices, offs=ends)
    assert [operation.__name__.partition(".")[0] for operation in operations.seen] == [compat.GROUPED_PRODUCT]


def test_a_module_reads_its_parameters_and_buffers_from_its_dicts_and_an_attribute_hides_a_parameter() -> (
    None
):
    module = nn.BatchNorm1d(3)
    attributes = module.__dict__
    assert attributes[compat.PARAMETERS]["weight"] is module.weight
    buffer = attributes[compat.BUFFERS]["running_mean"] = torch.full((3,), 2.0)
    assert module.running_mean is buffer
    parameter, shown = module.weight, torch.zeros(3)
    attributes["weight"] = shown
    assert module.weight is shown
    assert dict(module.named_parameters())["weight"] is parameter


@pytest.mark.parametrize("move", [lambda m: m.to(torch.float64), lambda m: m.half(), lambda m: m.cpu()])
def test_moves_and_conversions_call_one_method_of_each_module_with_the_function(move: Callable) -> None:
    model, given = nn.Sequential(nn.Linear(2, 2)), []
    apply = getattr(model[0], compat.APPLY)

    def noted(fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object) -> nn.Module:
        given.append(fn(torch.ones(1)).dtype)
        return apply(fn, *args, **kwargs)

    setattr(model[0], compat.APPLY, noted)
    move(model)
    assert given == [model[0].weight.dtype]


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.slow
def test_the_compiler_counts_as_imported_once_something_uses_it() -> None:
    source = (
        "import torch\nfrom drivetrain_dispatch.compat import is_compiler_imported\n"
        "print(is_compiler_imported())\ntorch.compiler.disable(print)\nprint(is_compiler_imported())\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert finished.stdout.split() == ["False", "True"]


def test_fake_tensors_have_the_device_that_is_said_and_no_data() -> None:
    with compat.FakeTensorMode():
        product = torch.empty(10**6, 10**6) @ torch.empty(10**6, 2)
    assert (product.shape, product.device.type) == ((10**6, 2), "cpu")


def test_what_depends_on_the_values_of_fake_tensors_raises_the_errors_that_are_named() -> None:
    with compat.FakeTensorMode():
        with pytest.raises(compat.DATA_DEPENDENT_ERRORS):
            bool(torch.ones(2).sum() > 0)
        with pytest.raises(compat.DATA_DEPENDENT_ERRORS):
            torch.ones(2).nonzero()


def test_leaves_are_found_in_nested_values() -> None:
    assert compat.tree_leaves([1, {"a": (2, None)}, []]) == [1, 2, None]
