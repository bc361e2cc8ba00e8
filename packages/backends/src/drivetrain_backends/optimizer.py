"""An optimizer as the training loop sees it: stepping goes through the backend, all else to the real one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of a call to `step`.

    Attributes:
        stepped: The optimizer moved the parameters.
        skipped: The window was closed, and the step left out because a gradient was not finite: in fp16, or where the
            run says so.
        grad_norm: The global gradient norm before clipping, shape (), where one was computed for this step.
    """

    stepped: bool
    skipped: bool
    grad_norm: Tensor | None = None


class Stepper(Protocol):
    """The part of `Prepared` that an optimizer is stepped through."""

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one of the model's optimizers."""
        ...

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer."""
        ...


class PreparedOptimizer(Optimizer):
    """Stands in for the user's optimizer: the same groups and state, `step` and `zero_grad` in step with the window.

    Args:
        optimizer: The user's optimizer, over the prepared parameters.
        prepared: The model it trains.

    Attributes:
        optimizer: The user's optimizer.
        num_steps: How often it moved the parameters; skipped steps and open windows do not count.
        last_result: What became of the last call to `step`; None before the first.
        on_step: Called when a window ends with it, be it that the parameters moved or that the step was skipped.
    """

    def __init__(self, optimizer: Optimizer, prepared: Stepper) -> None:
        # Not calling Optimizer.__init__: groups, state and defaults stay where they are, in the user's optimizer.
        self.optimizer = optimizer
        self.prepared = prepared
        self.num_steps = 0
        self.last_result: StepResult | None = None
        self.on_step: Callable[[], None] | None = None

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step if the accumulation window is closed. Called on all ranks.

        Raises:
            ValueError: A closure is given: it would run backward behind the backend's back.
        """
        if closure is not None:
            raise ValueError(
                "step(closure): a closure computes gradients outside accelerator.backward, where they are neither "
                "scaled nor reduced; step the optimizer without one, or leave it out of prepare()"
            )
        result = self.prepared.step(self.optimizer)
        self.last_result = result
        self.num_steps += result.stepped
        if self.on_step is not None and (result.stepped or result.skipped):
            self.on_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; those that an open window has gathered stay."""
        self.prepared.zero_grad(self.optimizer, set_to_none=set_to_none)

    @property
    def was_skipped(self) -> bool:
        """Whether the last call to `step` was left out because a gradient was not finite."""
        return self.last_result is not None and self.last_result.skipped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The user's parameter groups; learning rates are read and set here."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state by parameter, as the user's optimizer keeps it."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values a new parameter group starts from."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer; its parameters must belong to a prepared model."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's own state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set: while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


# Options that schedulers add, and that optimizers fill in where a state of another version has none.
_OPTIONAL = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
    | {
        "amsgrad",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    }
)


def named_state(optimizer: Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    """An optimizer's state with parameters under their names, so that it survives another order or subset.

    Args:
        optimizer: The user's optimizer.
        names: The canonical name of each parameter.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], **options}]}`.
    """
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "param_groups": groups}


def named_groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of the parameters of each of an optimizer's groups."""
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def load_named_state(optimizer: Optimizer, names: dict[Tensor, str], state: dict[str, Any]) -> None:
    """Load what `named_state` gave.

    Raises:
        ValueError: The groups hold other parameters than the saved ones; the message names the first few.
    """
    own = named_groups(optimizer, names)
    check_groups(own, state["param_groups"], optimizer)
    order = [name for group in own for name in group]
    positions = {name: index for index, name in enumerate(order)}
    groups = [
        {**saved, "params": [positions[name] for name in group]}
        for saved, group in zip(state["param_groups"], own, strict=True)
    ]
    by_index = {positions[name]: value for name, value in state["state"].items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def check_groups(
    own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], optimizer: Optimizer
) -> None:
    """Hold the parameter groups of an optimizer against saved ones.

    Args:
        own: The names of the parameters of each group.
        saved: The groups of a named state.
        optimizer: Theirs.

    Raises:
        ValueError: They hold other parameters, or lack options that this kind of optimizer has; the message names the
            first few.
    """
    if len(saved) != len(own):
        raise ValueError(
            f"the optimizer has {len(own)} parameter groups, the checkpoint {len(saved)}; build it with the same "
            "groups"
        )
    for group, saved_group in zip(own, saved, strict=True):
        if odd := sorted(set(group) ^ set(saved_group["params"])):
            raise ValueError(
                f"a parameter group of the optimizer differs from the checkpoint's by {odd[:5]}"
                f"{' and others' if len(odd) > 5 else ''}; build it over the same parameters"
            )
    for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
        if lacking := sorted(set(group) - set(saved_group) - _OPTIONAL):
            raise ValueError(
                f"the optimizer's groups have {lacking}, which the checkpoint's have not: it was saved with another "
                f"kind of optimizer than {type(optimizer).__name__}; build the one that was saved"
            )
