import pytest
import torch

from drivetrain_precision import PrecisionError, PrecisionSettings, choose_policy
from drivetrain_precision.dtypes.dtype_policy import DtypePolicy

CPU = torch.device("cpu")


def dtypes(mode: str, **said: object) -> DtypePolicy:
    return choose_policy(mode, CPU, PrecisionSettings(**said)).dtypes


def test_nothing_is_said_by_default() -> None:
    assert dtypes("bf16") == DtypePolicy()
    assert dtypes("bf16").said() == {}


def test_what_is_said_is_told_by_the_names_of_the_settings() -> None:
    said = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp16", "keep_fp32": ("*.norm",)}
    assert dtypes("bf16", **said).said() == said


def test_weights_in_bf16_are_updated_by_kahan_sums_unless_said_otherwise() -> None:
    assert dtypes("no", param_dtype="bf16").update == "kahan"
    assert dtypes("no", param_dtype="bf16", weight_update="nearest").update == "nearest"
    assert dtypes("no", param_dtype="fp32").update is None


@pytest.mark.parametrize(
    ("mode", "said", "message"),
    [
        ("fp16", {"param_dtype": "bf16"}, "param_dtype='bf16' with mixed_precision='fp16'"),
        ("bf16", {"param_dtype": "fp32", "weight_update": "kahan"}, "weight_update='kahan' with .*='fp32'"),
    ],
)
def test_dtypes_that_contradict_each_other_are_refused(mode: str, said: dict[str, str], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        dtypes(mode, **said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"param_dtype": "fp16"}, "weights are not held in fp16"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype='fp8': must be one of fp32, bf16, fp16"),
        ({"weight_update": "up"}, "weight_update='up': must be one of nearest, stochastic, kahan"),
        ({"keep_fp32": ("",)}, "a pattern must not be empty"),
    ],
)
def test_unknown_values_are_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionSettings(**said)
