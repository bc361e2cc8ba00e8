"""Train in fp8: convert models, and prove by the first step that their products run in the recipe's formats."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from drivetrain.fp8.first_step_products import FirstStepProducts
from drivetrain_backends import unwrap_compiled
from drivetrain_backends.modules.model_checks import check_new
from drivetrain_precision import (
    ConversionReport,
    NothingConvertedError,
    PrecisionError,
    convert_model,
    find_islands,
    load_recipe_state,
    recipe_state,
    restore_model,
)
from drivetrain_precision.conversion.conversion_plan import linear_names
from drivetrain_precision.conversion.layer_filter import check_pattern
from drivetrain_precision.fp8.protocol import Fp8Recipe, gathers_in_fp8
from drivetrain_precision.fp8.step_verdict import PATIENCE_STEPS, StepVerdict, judge_step, judge_unproved
from drivetrain_state import Context
from drivetrain_weights.tensor_box import is_dtensor

logger = logging.getLogger(__name__)

LAYERS, PRODUCTS = "fp8 layers", "fp8 products"  # facts of the plan


def check_gathers(models: Iterable[nn.Module], *, said: str) -> None:
    """Check, on prepared models, that the backend gathers the weights that are to be gathered in fp8.

    Args:
        models: The models that were prepared.
        said: The argument or setting that gave the recipe, for the message.

    Raises:
        PrecisionError: The backend does not gather weights.
    """
    for model in models:
        for name, module in unwrap_compiled(model).named_modules():
            if gathers_in_fp8(module) and not is_dtensor(module.weight):
                raise PrecisionError(
                    f"{said}: the weight of {name} is not divided among ranks, so that nothing is gathered in fp8; "
                    "leave all_gather out, or train with backend='fsdp'"
                )


class Fp8Training:
    """The recipe of a run, from the conversion of its models to their release.

    Args:
        recipe: The recipe of the run.
        context: The ranks and the device.
        keep_fp32: The patterns of the modules that stay in fp32, which are not converted.
        exclude: The patterns of `fp8_exclude`, for messages about them; the recipe already applies them.
        on_count: A function that is called with facts for the plan when the products of a step are known.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        context: Context,
        *,
        keep_fp32: Sequence[str] = (),
        exclude: Sequence[str] = (),
        on_count: Callable[[dict[str, str]], None],
    ) -> None:
        self._recipe, self._context, self._keep_fp32 = recipe, context, keep_fp32
        self._exclude = exclude
        self._on_count: Callable[[dict[str, str]], None] | None = on_count
        self._models: list[nn.Module] = []
        self._reports: list[ConversionReport] = []
        self._linear_names: set[str] = set()
        self._last = 0  # how many models there were before the last conversion
        self._products = FirstStepProducts(context.progress, recipe.counting, self._models)

    def convert(self, models: Sequence[nn.Module]) -> dict[str, str]:
        """Convert models in place, before a backend prepares them. Called on all ranks.

        Returns:
            The fact for the plan.

        Raises:
            PrecisionError: No layer of any model of the run can be converted, or a model cannot be converted as the
                recipe says; all models stay as they were.
            ValueError: A model is prepared already.
        """
        check_new(models)  # whose layers are converted: to restore them would take fp8 from a run
        self._last = len(self._models)
        refused: list[NothingConvertedError] = []
        plain = list(map(unwrap_compiled, models))
        # Found before any class changes: a pattern may be the name of a class.
        islands = find_islands(plain, self._keep_fp32, known=self._models)
        # A pattern of the recipe may match in one of the run's models alone, as one of keep_fp32 may.
        self._linear_names.update(name for model in plain for name in linear_names(model))
        try:
            for pattern in self._exclude:
                check_pattern(pattern, sorted(self._linear_names), said=f"precision.fp8_exclude={pattern!r}")
            for model in plain:
                kept = dict.fromkeys(islands[model], "stays in fp32 (keep_fp32)")
                kept |= dict.fromkeys(
                    self._find_converted(self._models), "is shared with a model converted before"
                )
                try:
                    report = convert_model(
                        model, self._recipe, device=self._context.device, kept=kept, known=self._linear_names
                    )
                    self._reports.append(report)
                    self._models.append(model)
                except NothingConvertedError as error:
                    refused.append(error)
            if refused and not self._models:
                raise refused[0]
        except BaseException:
            self.undo()
            raise
        for report in self._reports[self._last :]:
            logger.info("%s", report)
        for error in refused:
            logger.warning("a model stays in bf16: %s", error)
        if not self._models:
            return {}
        self._products.begin()
        converted = sum(len(report.converted_linear) for report in self._reports)
        linear = sum(each.is_linear for report in self._reports for each in report.layers)
        return {LAYERS: f"{converted} of {linear} linear layers in {self._recipe.name}"}

    def check(self) -> None:
        """Check, on prepared models, that the backend gathers weights in fp8 if the recipe says so."""
        check_gathers(self._models, said=f"fp8_recipe={self._recipe!r}")

    def undo(self) -> None:
        """Restore the plain layers of the models of the last `convert`, after their preparation failed."""
        self._undo(self._last)

    def end_step(self) -> None:
        """Report the formats of the first step's products. Called on all ranks.

        Raises:
            PrecisionError: A converted model was called, but none of its products ran in the recipe's formats.
        """
        num_models = len(self._models)
        if (step := self._products.end_step()) is not None:
            self._tell(
                judge_step(
                    step,
                    recipe=self._recipe.name,
                    needed=self._recipe.requirements,
                    support=self._recipe.support(self._context.device),
                    models={  # by place, with a number where there are several
                        place: type(model).__name__
                        + (f" (converted model {place + 1} of {num_models})" if num_models > 1 else "")
                        for place, model in enumerate(self._models)
                    },
                )
            )

    def finish(self) -> None:
        """Stop counting when training ends, and report if no step could be counted. May be called on any rank."""
        step = self._products.unproved
        self._products.close()
        if step is not None and step.num_steps < PATIENCE_STEPS:
            self._tell(judge_unproved(step, self._recipe.name))

    def release(self) -> None:
        """Restore the plain layers of all models and forget the models, once the backend has released them."""
        self._undo(0)
        self._linear_names.clear()

    def close(self) -> None:
        """Stop counting, and drop the callback that informs the plan. May be called on any rank."""
        self._on_count = None
        self._products.close()

    def _undo(self, first: int) -> None:
        """Restore the plain layers of the models from index `first` on, except layers shared with earlier models."""
        kept = self._find_converted(self._models[:first])
        for model in self._models[first:]:
            restore_model(model, self._recipe, kept=kept)
        del self._models[first:], self._reports[first:]

    def _find_converted(self, models: Sequence[nn.Module]) -> set[nn.Module]:
        """Return the layers of models that compute in the recipe."""
        return {each for model in models for each in model.modules() if self._recipe.is_converted(each)}

    def _tell(self, verdict: StepVerdict) -> None:
        if verdict.error is not None:
            raise PrecisionError(verdict.error)
        if verdict.warning is not None and self._context.topology.is_main:
            logger.warning("%s", verdict.warning)
        if verdict.fact is not None and self._on_count is not None:
            self._on_count({PRODUCTS: verdict.fact})

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state besides the weights, for each model in the order of conversion."""
        return {
            "recipe": self._recipe.name,
            "models": [recipe_state(model, self._recipe) for model in self._models],
        }

    def keeps_state(self) -> bool:
        """Return whether the recipe has any state besides the weights."""
        return any(recipe_state(model, self._recipe) for model in self._models)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Ignore a state of another recipe or precision: layers begin as new.

        Raises:
            PrecisionError: A tensor was saved in another shape than the recipe keeps.
        """
        saved, of_models = state.get("recipe"), state.get("models", [])
        if saved != self._recipe.name:
            self._log_new_scales(f"was trained in {saved or 'another precision than fp8'}")
        elif len(of_models) != len(self._models):
            self._log_new_scales(f"holds {len(of_models)} models converted to it, not {len(self._models)}")
        else:
            missing = [
                name
                for model, kept in zip(self._models, of_models, strict=True)
                for name in load_recipe_state(model, self._recipe, kept)
            ]
            if missing and self._context.topology.is_main:
                logger.warning(
                    "the checkpoint has no state of %s for %s: these begin as if new",
                    self._recipe.name,
                    ", ".join(missing),
                )

    def _log_new_scales(self, found: str) -> None:
        if self._context.topology.is_main:
            logger.info(
                "the checkpoint %s, this run trains in %s: weights are the same, scales begin anew",
                found,
                self._recipe.name,
            )
