"""Conversion to torchao's float8 and to Transformer Engine, held against the installed Accelerate."""

import pytest
from torch import nn

from drivetrain_accelerate.plugins import fp8_recipes as ours
from drivetrain_accelerate.plugins.enums import FP8BackendType
from drivetrain_accelerate.plugins.fp8_recipes import AORecipeKwargs
from drivetrain_precision import PrecisionError

pytest.importorskip("accelerate")
pytest.importorskip("torchao")
from accelerate.utils import ao as theirs


def model() -> nn.Module:
    inner = nn.Sequential(nn.Linear(32, 20), nn.Linear(32, 32))
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), inner, nn.Linear(32, 32))


def test_layers_are_chosen_as_by_the_real_one() -> None:
    for each in (model(), nn.ReLU(), nn.Linear(2, 2)):
        assert ours.find_first_last_linear_layers(each) == theirs.find_first_last_linear_layers(each)
    for name, module in model().named_modules():
        for left_out in ([], ["2.1"], ["2"], [name]):
            found = ours.filter_linear_layers(module, name, left_out)
            assert found == theirs.filter_linear_layers(module, name, left_out)


@pytest.mark.parametrize("chosen", [None, "0"])
def test_the_same_layers_are_converted(chosen: str | None) -> None:
    function = None if chosen is None else lambda _, name: name == chosen
    names = []
    for module in (ours, theirs):
        converted = model()
        assert not module.has_ao_layers(converted)
        module.convert_model_to_fp8_ao(converted, module_filter_func=function)
        assert module.has_ao_layers(converted)
        assert ours.has_ao_layers(converted)
        names.append(
            [name for name, each in converted.named_modules() if "Float8Linear" in type(each).__name__]
        )
    assert names[0] == names[1]


def test_the_default_options_train_on_one_process_which_gathers_nothing() -> None:
    from accelerate_sides import OURS

    with OURS.accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]) as accelerator:
        assert accelerator.fp8_backend == FP8BackendType.AO
        assert ours.has_ao_layers(accelerator.prepare(model()))


def test_without_transformer_engine_it_is_named() -> None:
    plain = nn.Sequential(nn.Linear(16, 16))
    assert not ours.has_transformer_engine_layers(plain)
    ours.convert_model(plain, _convert_linear=False)
    ours.convert_model(plain, to_transformer_engine=False)
    pytest.importorskip("torchao")
    with pytest.raises(PrecisionError, match="te_delayed: it needs an Ada"):
        ours.convert_model(plain)
