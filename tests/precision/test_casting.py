import pytest
import torch

from drivetrain_precision import autocast, choose_policy

CPU = torch.device("cpu")


def product_dtype(mode: str, *, enabled: bool = True) -> torch.dtype:
    with autocast(choose_policy(mode, CPU), CPU, enabled=enabled):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_products_run_in_the_policys_dtype() -> None:
    assert product_dtype("no") is torch.float32
    assert product_dtype("bf16") is torch.bfloat16
    assert product_dtype("fp16") is torch.float16


def test_an_outer_autocast_can_be_turned_off_inside() -> None:
    with autocast(choose_policy("bf16", CPU), CPU):
        assert product_dtype("bf16", enabled=False) is torch.float32


def test_it_stands_for_torch_autocast() -> None:
    with autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        with autocast("cpu", enabled=False):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with autocast(device_type_default := "cpu", dtype=torch.float16, cache_enabled=False):
        assert torch.get_autocast_dtype(device_type_default) is torch.float16
    assert isinstance(autocast("cpu"), torch.autocast)


@pytest.mark.parametrize(("mode", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_it_decorates_functions(mode: str, dtype: torch.dtype) -> None:
    @autocast(choose_policy(mode, CPU), CPU)
    def product() -> torch.Tensor:
        return torch.ones(2, 2) @ torch.ones(2, 2)

    assert product().dtype is product().dtype is dtype


@pytest.mark.parametrize(
    "arguments", [(choose_policy("bf16", CPU), torch.bfloat16), (choose_policy("no", CPU),), ("cpu", CPU)]
)
def test_arguments_of_two_forms_are_not_mixed(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="after a"):
        autocast(*arguments)
