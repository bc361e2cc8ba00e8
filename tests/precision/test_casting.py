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
