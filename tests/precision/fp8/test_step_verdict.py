import pytest

from drivetrain_precision import Support
from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_precision.fp8.protocol import Requirements
from drivetrain_precision.fp8.step_verdict import (
    PATIENCE_STEPS,
    StepProducts,
    StepVerdict,
    judge_step,
    judge_unproved,
)

NATIVE = Support(level="native", reason="the device has units for it")
EMULATED = Support(level="emulated", reason="emulated here")


def judged(
    scaled: int = 3,
    others: int = 5,
    *,
    by_model: dict[int, int] | None = None,
    support: Support = NATIVE,
    compiled: int = 0,
    hindrance: str | None = None,
    num_steps: int = 1,
    num_models: int = 1,
    wants_compile: bool = False,
    counts_emulation: bool = False,
) -> StepVerdict:
    step = StepProducts(
        counts=ProductCounts(scaled=scaled, others=others, compiled=compiled, is_counted=True),
        scaled_by_model={0: scaled} if by_model is None else by_model,
        hindrance=hindrance,
        num_steps=num_steps,
    )
    needed = Requirements(
        library="fast",
        version="1",
        extra="fast",
        capability=(9, 0),
        hardware="a GPU",
        wants_compile=wants_compile,
        counts_emulation=counts_emulation,
    )
    models = {place: f"model {place}" for place in range(num_models)}
    return judge_step(step, recipe="fast_fp8", needed=needed, support=support, models=models)


TOLD = "3 of 8 matrix products of the first step ran in fast_fp8"


def test_products_in_the_recipe_are_a_fact_alone() -> None:
    assert judged() == StepVerdict(fact=TOLD)
    assert judged(support=EMULATED, counts_emulation=True) == StepVerdict(fact=f"{TOLD}; emulated here")


@pytest.mark.parametrize(
    ("support", "counts_emulation", "fails"),
    [(NATIVE, False, True), (EMULATED, True, True), (EMULATED, False, False)],
)
def test_no_product_is_an_error_where_products_can_be_seen(
    support: Support, counts_emulation: bool, fails: bool
) -> None:
    verdict = judged(scaled=0, support=support, counts_emulation=counts_emulation)
    assert (verdict.error is not None) == fails
    if not fails:
        assert verdict.fact == "emulated, and not to be told from plain products; emulated here"
    else:
        assert "none of the 5 matrix products of the first step ran in fast_fp8" in str(verdict.error)


def test_models_without_a_product_of_their_own_are_named() -> None:
    verdict = judged(by_model={0: 0, 1: 1, 2: 0}, num_models=3)
    assert "in the forwards of model 0, model 2: the converted layers" in str(verdict.error)


def test_models_that_were_not_called_are_told_and_no_error() -> None:
    verdict = judged(by_model={1: 1}, num_models=3)
    assert verdict == StepVerdict(fact=f"{TOLD}, in which 1 of 3 converted models were called")


def test_a_backward_proves_a_model_whose_parts_were_called_alone() -> None:
    assert judged(by_model={}) == StepVerdict(fact=TOLD)


@pytest.mark.parametrize(
    ("support", "compiled", "warns"), [(NATIVE, 0, True), (NATIVE, 2, False), (EMULATED, 0, False)]
)
def test_hardware_without_compiled_code_is_warned_of(support: Support, compiled: int, warns: bool) -> None:
    verdict = judged(wants_compile=True, support=support, compiled=compiled)
    assert (verdict.warning is not None) == warns


def test_steps_that_prove_nothing_are_told_once_the_patience_ends() -> None:
    verdicts = [judged(hindrance="it rains", num_steps=num_steps) for num_steps in range(1, 20)]
    told = [place for place, verdict in enumerate(verdicts, 1) if verdict != StepVerdict()]
    assert told == [PATIENCE_STEPS]
    assert verdicts[PATIENCE_STEPS - 1].fact == "not counted in 10 steps: it rains"
    assert "after 10 steps nothing shows" in str(verdicts[PATIENCE_STEPS - 1].warning)


def test_one_step_is_told_in_the_singular() -> None:
    step = StepProducts(counts=ProductCounts(), scaled_by_model={}, hindrance="it rains", num_steps=1)
    assert judge_unproved(step, "fast_fp8").fact == "not counted in 1 step: it rains"
