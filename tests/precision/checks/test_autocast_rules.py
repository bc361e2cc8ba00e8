"""The rules are torch's own: they are held against what operations do, where a device of the kind is there."""

import pytest
import torch
import torch.nn.functional as F

from drivetrain_precision import autocast_rules, fp32_operations

X = torch.ones(2, 3)
CALLS = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x.T,
    "mse_loss": lambda x: F.mse_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "prod": lambda x: x.prod(),
    "kl_div": lambda x: torch.kl_div(x, x),
    "cat": lambda x: torch.cat([x, x]),
    "cdist": lambda x: torch.cdist(x, x),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_rule_is_what_the_operation_does_on_this_device(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        narrow, wide = CALLS[name](X.bfloat16()).dtype, CALLS[name](X).dtype
    expected = {
        (torch.float32, torch.float32): "fp32",
        (torch.bfloat16, torch.bfloat16): "half",
        (torch.bfloat16, torch.float32): "widest",
    }
    assert autocast_rules("cpu")[name] == expected[narrow, wide]


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_devices_that_are_not_here_have_rules_too(kind: str) -> None:
    rules = autocast_rules(kind)
    for name in ("softmax", "log_softmax", "layer_norm", "nll_loss", "exp", "pow", "sum", "cumsum"):
        assert rules[name] == "fp32", name
    for name in ("linear", "matmul", "conv2d", "scaled_dot_product_attention"):
        assert rules[name] == "half", name
    assert rules["addcmul"] == "widest"


def test_what_autocast_refuses_is_told() -> None:
    assert autocast_rules("cuda")["binary_cross_entropy"] == "refused"


def test_the_lists_of_devices_differ() -> None:
    assert "softmax" in fp32_operations("cuda")
    assert "softmax" not in fp32_operations("cpu")
    assert "cross_entropy_loss" in fp32_operations("cpu")


def test_asking_leaves_autocast_as_it_is() -> None:
    with torch.autocast("cpu", torch.float16):
        fp32_operations("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", ["meta", "xla", "toaster"])
def test_a_device_without_rules_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"device_type='{kind}'.*no rules of autocast"):
        fp32_operations(kind)
