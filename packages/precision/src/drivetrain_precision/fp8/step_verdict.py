"""Judge from the matrix products of a step whether a run computes in fp8: pure functions from counts to a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_precision.fp8.protocol import Requirements
from drivetrain_precision.support import Support

PATIENCE_STEPS = 10  # a run that compiles for each of its first sizes takes a few


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProducts:
    """The matrix products of an optimizer step."""

    counts: ProductCounts  # of its forwards and backwards
    # Those in the recipe's formats in the forwards of converted models that were called, by the place of each model.
    scaled_by_model: Mapping[int, int]
    hindrance: str | None  # the reason why the products prove nothing
    num_steps: int  # so far, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """A verdict on a run."""

    fact: str | None = None  # for the plan
    warning: str | None = None  # for rank 0
    error: str | None = None  # the message of the error that ends the run


def judge_step(
    step: StepProducts, *, recipe: str, needed: Requirements, support: Support, models: Mapping[int, str]
) -> StepVerdict:
    """Return the verdict on a step, empty if later steps may decide. `models` holds descriptions by place."""
    if step.hindrance is not None:
        return judge_unproved(step, recipe) if step.num_steps == PATIENCE_STEPS else StepVerdict()
    counts = step.counts
    total = counts.scaled + counts.others
    # Emulation that cannot be told from plain products proves nothing, and is no error.
    is_seen = support.level == "native" or needed.counts_emulation
    if not is_seen:
        return StepVerdict(fact=f"emulated, and not to be told from plain products; {support.reason}")
    fact = f"{counts.scaled} of {total} matrix products of the first step ran in {recipe}"
    if len(step.scaled_by_model) not in (0, len(models)):
        fact += f", in which {len(step.scaled_by_model)} of {len(models)} converted models were called"
    if support.level == "emulated":
        fact += f"; {support.reason}"
    if (error := _explain_error(step, recipe, models)) is not None:
        return StepVerdict(error=error)
    warning = None
    if support.level == "native" and needed.wants_compile and not counts.compiled:
        warning = (
            f"{recipe} computes without torch.compile, which fuses its casts: it may be slower than bf16; compile "
            "the prepared model, or use a recipe of Transformer Engine"
        )
    return StepVerdict(fact=fact, warning=warning)


def judge_unproved(step: StepProducts, recipe: str) -> StepVerdict:
    """Return the verdict after a run's last step, if no step showed that the run computes in fp8."""
    steps = "1 step" if step.num_steps == 1 else f"{step.num_steps} steps"
    return StepVerdict(
        fact=f"not counted in {steps}: {step.hindrance}",
        warning=f"mixed_precision='fp8': after {steps} nothing shows that matrix products run in {recipe}, since "
        f"none could be counted: {step.hindrance}",
    )


def _explain_error(step: StepProducts, recipe: str, models: Mapping[int, str]) -> str | None:
    idle = [models[place] for place, scaled in step.scaled_by_model.items() if not scaled]
    if not step.counts.scaled:
        found = f"none of the {step.counts.others} matrix products of the first step ran in {recipe}"
    elif idle:
        found = f"no matrix product of the first step ran in {recipe} in the forwards of {', '.join(idle)}"
    else:
        return None
    return (
        f"mixed_precision='fp8': {found}: the converted layers of {', '.join(idle)} were not called, or other code "
        "replaced their forward; look at accelerator.plan, or train in bf16"
    )
