"""Train in fp8: convert models, and prove by the first step that their products run in the recipe's formats."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from drivetrain_backends import unwrap_compiled
from drivetrain_precision import (
    ConversionReport,
    GathersInFp8,
    PrecisionError,
    convert_model,
    load_recipe_state,
    recipe_state,
    restore_model,
)
from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_state import Context
from drivetrain_weights.tensor_box import is_dtensor

logger = logging.getLogger(__name__)

LAYERS, PRODUCTS = "fp8 layers", "fp8 products"  # facts of the plan


class Fp8Training:
    """The recipe of a run, from the conversion of its models to the scales of each step.

    Args:
        recipe: The recipe.
        context: The ranks and the device.
        on_count: A function that gets the facts of the plan once the first step has been counted.
    """

    def __init__(
        self, recipe: Fp8Recipe, context: Context, *, on_count: Callable[[dict[str, str]], None]
    ) -> None:
        self._recipe, self._context = recipe, context
        self._on_count: Callable[[dict[str, str]], None] | None = on_count
        self._models: list[nn.Module] = []
        self._counting: AbstractContextManager[ProductCounts] | None = None
        self._counts: list[ProductCounts] = []
        self._depth = 0
        self._thread = get_ident()

    def convert(self, models: Sequence[nn.Module]) -> dict[str, str]:
        """Convert models in place, before a backend prepares them. Called on all ranks.

        Returns:
            The fact of the plan.

        Raises:
            PrecisionError: No layer of any of them can be converted; all are left as they were.
        """
        plain = [unwrap_compiled(model) for model in models]
        reports: list[ConversionReport] = []
        errors: list[PrecisionError] = []
        for model in plain:
            try:
                reports.append(convert_model(model, self._recipe))
                self._models.append(model)
            except PrecisionError as error:
                errors.append(error)
        if errors and not reports:
            raise errors[0]
        if not plain:
            return {}
        if not self._counts:
            self._context.progress.add_observer(self._observe)
        for report in reports:
            logger.info("%s", report)
        for error in errors:
            logger.warning("a model stays in bf16: %s", error)
        converted = sum(len(report.converted) for report in reports)
        linear = sum(
            each.converts or not each.reason.endswith("not nn.Linear")
            for report in reports
            for each in report.layers
        )
        return {LAYERS: f"{converted} of {linear} linear layers in {self._recipe.name}"}

    def check(self) -> None:
        """Check that weights are gathered in fp8 if the recipe says so, once a backend has prepared the models.

        Raises:
            PrecisionError: The backend does not gather weights.
        """
        for model in self._models:
            for name, module in model.named_modules():
                if isinstance(module, GathersInFp8) and not is_dtensor(module.weight):
                    raise PrecisionError(
                        f"fp8_recipe={self._recipe!r}: the weight of {name} is not divided among ranks, so "
                        "that nothing is gathered in fp8; leave all_gather out, or train with backend='fsdp'"
                    )

    def undo(self, models: Sequence[nn.Module]) -> None:
        """Give models their plain layers back, after a preparation that failed."""
        for model in map(unwrap_compiled, models):
            restore_model(model, self._recipe)
            self._models = [each for each in self._models if each is not model]

    def end_step(self) -> None:
        """Prepare the scales of the next step; after the first one, tell what ran. Called on all ranks.

        Raises:
            PrecisionError: No matrix product of the first step ran in the recipe's formats.
        """
        for model in self._models:
            self._recipe.after_step(model)
        counted = [each for each in self._counts if each.is_counted]
        if not counted:  # another profiler recorded: the next step may tell
            self._counts.clear()
            return
        self._context.progress.remove_observer(self._observe)
        self._counts.clear()
        scaled, others = sum(each.scaled for each in counted), sum(each.others for each in counted)
        told = f"{scaled} of {scaled + others} matrix products of the first step ran in {self._recipe.name}"
        support = self._recipe.support(self._context.device)
        if support.level == "emulated":
            told += f"; {support.reason}"
        elif not scaled:
            raise PrecisionError(
                f"mixed_precision='fp8': none of the {others} matrix products of the first step ran in "
                f"{self._recipe.name}: the converted layers ({len(self._models)} models) were not called, or other "
                "code replaced their forward; look at accelerator.plan, or train in bf16"
            )
        if self._on_count is not None:
            self._on_count({PRODUCTS: told})
            self._on_count = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the recipe keeps beside the weights, for each model in the order of conversion."""
        return {
            "recipe": self._recipe.name,
            "models": [recipe_state(model, self._recipe) for model in self._models],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; of another recipe or precision, nothing: the layers begin as if new."""
        saved = state.get("recipe")
        if saved == self._recipe.name:
            for model, kept in zip(self._models, state["models"], strict=True):
                load_recipe_state(model, self._recipe, kept)
        elif self._context.topology.is_main:
            logger.info(
                "the checkpoint was trained in %s, this run trains in %s: weights are the same, scales begin anew",
                saved or "another precision than fp8",
                self._recipe.name,
            )

    def close(self) -> None:
        """Stop counting, and forget what the plan is told by. May be called on any rank."""
        self._on_count = None
        self._context.progress.remove_observer(self._observe)

    def _observe(self, label: str) -> None:
        """Count inside forwards and backwards of the first step."""
        if get_ident() != self._thread:
            return
        if label in ("forward", "backward"):
            if label == "forward" and not torch.is_grad_enabled():
                return
            self._depth += 1
            if self._depth == 1:
                self._counting = self._recipe.counting()
                self._counts.append(self._counting.__enter__())
        elif label in ("forward done", "backward done") and self._depth:
            self._depth -= 1
            if self._depth == 0 and self._counting is not None:
                self._counting.__exit__(None, None, None)
                self._counting = None
