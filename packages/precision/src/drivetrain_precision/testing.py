"""The contract that every fp8 recipe must pass.

A recipe's test subclasses `RecipeContract`, implements `make`, and calls `check_all`. All checks but
`check_training` compute nothing in the recipe, and pass on devices without units for it.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_precision.conversion.conversion_plan import plan_conversion
from drivetrain_precision.conversion.layer_changes import change_layers
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.layer_conversion import (
    convert_model,
    load_recipe_state,
    recipe_state,
    restore_model,
)
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_precision.support import Support


class RecipeContract(ABC):
    """A set of checks that every recipe must pass; a failed check raises an AssertionError that explains it.

    Attributes:
        features: A size of layers that the recipe accepts, as input and as output.
        odd_features: A size that the recipe refuses; None if it accepts all sizes.
        device: The device of the checks.
    """

    features: int = 128
    odd_features: int | None = 100
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def make(self) -> Fp8Recipe:
        """Return the recipe, always with the same options."""

    def check_all(self) -> list[str]:
        """Run every check, and return the checks' names; AssertionError if the recipe fails a check."""
        for check in self.checks:
            check()
        return [check.__name__ for check in self.checks]

    @property
    def checks(self) -> Sequence[Callable[[], None]]:
        """All of the checks."""
        return (
            self.check_it_is_a_value,
            self.check_it_tells_its_support,
            self.check_layers_can_be_chosen,
            self.check_plain_layers_are_not_converted,
            self.check_sizes_are_refused_before_they_are_converted,
            self.check_a_conversion_keeps_weights_and_names,
            self.check_restoring_gives_plain_layers_back,
            self.check_converted_layers_are_copied,
            self.check_state_is_what_layers_work_with,
            self.check_training,
        )

    def check_it_is_a_value(self) -> None:
        """Check that recipes compare by their options, survive pickling and have one-word names."""
        recipe = self.make()
        assert recipe == self.make(), "a recipe is a value: a frozen dataclass compares its options"
        assert hash(recipe) == hash(self.make()), "a recipe is a value: equal ones have equal hashes"
        assert pickle.loads(pickle.dumps(recipe)) == recipe, "a recipe that was pickled is equal to itself"
        assert recipe.name == "_".join(recipe.name.split()) != "", f"name={recipe.name!r} must be a word"
        formats = recipe.products
        for field in ("forward", "input_gradient", "weight_gradient", "all_gather", "attention"):
            assert getattr(formats, field), f"products.{field} must name a format"

    def check_it_tells_its_support(self) -> None:
        """Check that `support` returns a reason and never raises, even for a device without units for the recipe."""
        for device in (self.device, torch.device("cpu"), torch.device("meta")):
            found = self.make().support(device)
            assert isinstance(found, Support), f"support({device}) must return a Support, not {found!r}"
            assert found.reason, f"support({device}) must give a reason for level={found.level!r}"
        needed = self.make().requirements
        assert all((needed.library, needed.version, needed.hardware)), (
            f"requirements must name the library, its first version and the hardware: {needed}"
        )

    def check_layers_can_be_chosen(self) -> None:
        """Check that `dataclasses.replace(recipe, layers=...)` changes the recipe's layers, as settings do."""
        chosen = LayerFilter(exclude=("nothing.*",), skip_first=False, skip_last=False)
        recipe = self._recipe(chosen)
        assert recipe.layers == chosen, f"layers={recipe.layers} after replace(recipe, layers={chosen})"
        assert recipe.name == self.make().name, "the choice of layers does not change the name"

    def check_sizes_are_refused_before_they_are_converted(self) -> None:
        """Check that `refusal` accepts every layer that `convert` takes, and gives a reason for other sizes."""
        recipe = self.make()
        fits = self._linear(self.features, self.features)
        assert recipe.refusal(fits) is None, f"refused {self.features} features: {recipe.refusal(fits)}"
        if self.odd_features is None:
            return
        for sizes in ((self.odd_features, self.features), (self.features, self.odd_features)):
            why = recipe.refusal(self._linear(*sizes))
            assert why, f"a layer of {sizes[0]} to {sizes[1]} features must be refused with a reason"
            assert str(self.odd_features) in why, f"the reason must say the size {self.odd_features}: {why!r}"
        odd = nn.Sequential(self._linear(self.odd_features, self.odd_features))
        try:
            convert_model(odd, self._recipe())
        except PrecisionError:  # or the device cannot run the recipe at all
            assert type(odd[0]) is nn.Linear, "a refused layer must stay as it was"
            return
        raise AssertionError("a model of which every layer is refused must not be converted")

    def check_plain_layers_are_not_converted(self) -> None:
        """Check that `is_converted` tells converted layers from plain layers and from other modules."""
        recipe, model = self.make(), self._model()
        for module in (*model.modules(), nn.LayerNorm(4)):
            assert not recipe.is_converted(module), (
                f"is_converted says yes of a plain {type(module).__name__}"
            )
        self._convert(model)
        for name in ("up", "down"):
            assert recipe.is_converted(model.get_submodule(name)), (
                f"{name} was converted, is_converted says no"
            )
        assert not recipe.is_converted(model), "the parent of converted layers is not converted"
        try:
            convert_model(model, self._recipe())
        except PrecisionError:
            return
        raise AssertionError("a model that is converted already must be refused, which needs is_converted")

    def check_a_conversion_keeps_weights_and_names(self) -> None:
        """Check that a conversion keeps the parameters, and the state's names, order, dtypes and values."""
        model = self._model()
        before, held = _state_of(model), dict(model.named_parameters())
        self._convert(model)
        extra = set(recipe_state(model, self.make()))
        found = {name: value for name, value in _state_of(model).items() if name not in extra}
        _assert_equal(before, found, "after convert")
        for name, parameter in model.named_parameters():
            assert parameter is held[name], (
                f"convert exchanged the parameter {name}, which an optimizer may hold"
            )
        assert not model.up.weight.requires_grad, "convert must leave a frozen weight frozen"

    def check_restoring_gives_plain_layers_back(self) -> None:
        """Check that `restore` gives layers of torch's own class with equal weights, which can be converted again."""
        model = self._model()
        before, shared = _state_of(model), model.down
        for _ in range(2):
            self._convert(model)
            assert model.down is model.again, "a layer in two places must be exchanged in both"
            names = restore_model(model, self.make())
            assert set(names) == {"up", "down"}, f"restored {names}"
            assert type(model.up) is type(model.down) is nn.Linear, (
                f"restore must return nn.Linear, not {type(model.up).__name__}"
            )
            _assert_equal(before, _state_of(model), "after restore")
            assert vars(model.up).keys() == vars(self._model().up).keys(), (
                "restore must leave no attribute of its own"
            )
            assert model.down is model.again, "a layer in two places must be restored in both"
        assert shared.weight is model.down.weight, "restore must give back the same parameter"

    def check_converted_layers_are_copied(self) -> None:
        """Check that deepcopy and pickle make copies that are converted, and can be restored."""
        model = self._model()
        before = _state_of(model)
        self._convert(model)
        for how, copy in (("deepcopy", deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
            assert self.make().is_converted(copy.up), f"a copy by {how} must be converted"
            assert copy.up.weight is not model.up.weight, f"a copy by {how} must have weights of its own"
            restore_model(copy, self.make())
            _assert_equal(before, _state_of(copy), f"after {how} and restore")
        assert self.make().is_converted(model.up), "a copy that is restored must not restore its original"

    def check_state_is_what_layers_work_with(self) -> None:
        """Check that `state` returns the layer's own tensors, not copies: a load writes into them."""
        model, recipe = self._model(), self.make()
        self._convert(model)
        if recipe.support(self.device).level == "none":
            return  # its library may be what makes the state
        first, second = recipe_state(model, recipe), recipe_state(model, recipe)
        assert first.keys() == second.keys(), "state must have the same names each time"
        for name, value in first.items():
            assert value.data_ptr() == second[name].data_ptr(), (
                f"{name}: state must return the layer's own tensor"
            )
        saved = {name: torch.ones_like(value) for name, value in first.items()}
        assert load_recipe_state(model, recipe, saved) == (), "what state names must be loaded"
        for name, value in recipe_state(model, recipe).items():
            assert torch.equal(value, saved[name]), f"{name}: what was loaded must be what state returns then"

    def check_training(self) -> None:
        """Check that a step trains all layers and counts products in the recipe, if the device can run the recipe."""
        recipe, model = self.make(), self._model()
        if recipe.support(self.device).level == "none":
            return
        model.requires_grad_(True)
        self._convert(model)
        inputs = torch.randn(5, self.features, device=self.device)  # a number of rows that fits no block
        with (
            recipe.counting() as counts,
            torch.autocast(self.device.type, torch.bfloat16),
            recipe.computing(),
        ):
            output = model(inputs)
            output.float().square().mean().backward()
        assert output.shape == (5, self.features), f"an output of shape {tuple(output.shape)} for 5 rows"
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, f"{name} got no gradient"
            assert bool(gradient.isfinite().all()), f"{name} got a gradient that is not finite"
            assert bool(gradient.any()), f"{name} got a gradient of zeros"
            assert gradient.dtype == parameter.dtype, f"{name}: a gradient in {gradient.dtype}"
        seen = counts.scaled + counts.others
        assert seen > 0, "counting must count the products of converted layers"
        with torch.no_grad():
            assert model(inputs).shape == output.shape, "a converted model must compute without autocast too"

    def _linear(self, inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, device=self.device)

    def _model(self) -> "_Layers":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Layers(self.features).to(self.device)

    def _recipe(self, layers: LayerFilter | None = None) -> Fp8Recipe:
        """Return the recipe with other layers, by default with all layers."""
        options: dict[str, Any] = {"layers": layers or LayerFilter(skip_first=False, skip_last=False)}
        return replace(cast("Any", self.make()), **options)

    def _convert(self, model: nn.Module) -> None:
        recipe = self._recipe()
        if recipe.support(self.device).level == "none":  # layers can be converted where none can compute
            decisions = plan_conversion(model, recipe, recipe.layers)
            converted = tuple(each.name for each in decisions if each.converts)
            change_layers(model, converted, recipe.convert, recipe.restore)
        else:
            converted = convert_model(model, recipe).converted
        assert converted == ("up", "down"), f"converted {converted}, not up and down"


class _Layers(nn.Module):
    """Two layers, one of them frozen and one in two places; maps (rows, features) to (rows, features)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, features).requires_grad_(False)
        self.down = nn.Linear(features, features, bias=False)
        self.again = self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.down(torch.relu(self.up(x)))))


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _assert_equal(expected: dict[str, Tensor], found: dict[str, Tensor], when: str) -> None:
    assert list(expected) == list(found), f"{when}: the state has the names {[*found]}, not {[*expected]}"
    for name, value in expected.items():
        is_same = value.dtype == found[name].dtype and torch.equal(value, found[name])
        assert is_same, f"{when}: {name} is not bit for bit what it was"
