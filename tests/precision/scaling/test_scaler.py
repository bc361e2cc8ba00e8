import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_precision import LossScaler, PrecisionSettings

CPU = torch.device("cpu")


def scaled_gradient(scaler: LossScaler, value: float) -> torch.Tensor:
    parameter = torch.tensor([value], requires_grad=True)
    scaler.scale((parameter**2).sum()).backward()
    assert parameter.grad is not None
    return parameter.grad


@given(st.floats(-100, 100), st.floats(0.01, 100))
def test_unscaling_gives_the_gradient_back_times_the_factor(value: float, factor: float) -> None:
    scaler = LossScaler(CPU)
    gradient = scaled_gradient(scaler, value)
    scaler.unscale([gradient], factor=torch.tensor(factor, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([2 * value * factor]), rtol=1e-5, atol=1e-6)
    assert not scaler.overflowed()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_halves_the_scale_once(bad: float) -> None:
    scaler = LossScaler(CPU, PrecisionSettings(initial_scale=8.0))
    scaler.unscale([torch.tensor([1.0])])
    scaler.unscale([torch.tensor([bad])])
    assert scaler.overflowed()
    scaler.update()
    assert scaler.state_dict() == {"scale": 4.0, "growth_tracker": 0}
    assert not scaler.overflowed()
    scaler.update()
    assert scaler.state_dict()["scale"] == 4.0


def test_the_scale_grows_after_the_interval() -> None:
    scaler = LossScaler(CPU, PrecisionSettings(initial_scale=8.0, growth_interval=3))
    scales = []
    for _ in range(6):
        scaler.unscale([torch.tensor([1.0])])
        scaler.update()
        scales.append(scaler.state_dict()["scale"])
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]


def test_gradients_of_several_dtypes_are_unscaled_together() -> None:
    scaler = LossScaler(CPU, PrecisionSettings(initial_scale=2.0))
    gradients = [torch.tensor([4.0], dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    scaler.unscale(gradients)
    assert [g.item() for g in gradients] == [2.0, 2.0, 2.0]


def test_fp16_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="keep the parameters in fp32"):
        LossScaler(CPU).unscale([torch.zeros(1, dtype=torch.float16)])


def test_a_saved_scale_is_taken_up() -> None:
    scaler = LossScaler(CPU, PrecisionSettings(min_scale=0.7))
    for scale in (32.0, torch.tensor(0.7).item()):  # fp32 holds a little less than 0.7
        scaler.load_state_dict({"scale": scale, "growth_tracker": 7})
        assert scaler.state_dict() == {"scale": scale, "growth_tracker": 7}
    assert not scaler.can_fall()


def test_a_saved_scale_below_the_floor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale of 0\.5 is below precision\.min_scale=1\.0: set min_scale"):
        LossScaler(CPU).load_state_dict({"scale": 0.5, "growth_tracker": 0})


@given(st.lists(st.sampled_from([True, False, None]), max_size=30), st.floats(0.2, 0.9), st.integers(1, 3))
def test_the_host_knows_whether_the_scale_can_fall_as_the_device_does(
    steps: list[bool | None], backoff: float, interval: int
) -> None:
    settings = PrecisionSettings(
        initial_scale=4.0, backoff_factor=backoff, growth_interval=interval, min_scale=0.1
    )
    scaler = LossScaler(CPU, settings)
    for overflows in steps:  # None: a step whose check nobody reads
        scaler.unscale([torch.tensor([float("inf") if overflows else 1.0])])
        if overflows is not None:
            scaler.overflowed()
        scaler.update()
        floor = torch.tensor(0.1).item()  # as fp32 holds it: a little more
        assert scaler.value >= floor
        assert scaler.can_fall() == (scaler.value > floor)


def test_the_scale_does_not_grow_beyond_fp32_on_host_or_device() -> None:
    scaler = LossScaler(CPU, PrecisionSettings(initial_scale=2.0**127, growth_interval=1))
    scaler.unscale([torch.tensor([1.0])])
    assert not scaler.overflowed()
    scaler.update()
    assert scaler.value == 2.0**127
    assert scaler.can_fall()
