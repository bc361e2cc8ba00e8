"""A record of a model's parameters at `prepare`, and of in-place writes, to detect changes that are not trained."""

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.compat import as_they_are, modules_in, parameters_in, version_of
from drivetrain_backends.errors import PairingError, ReplacedParameterError
from drivetrain_messages import list_some

# A look at a model of 200 parameters takes about 25 us: less than 2 us a step at one look in 16 steps.
STEPS_A_LOOK = 16


class KnownParameters:
    """The parameters that a model had when it was prepared, to detect later changes.

    A backend compares at some of its steps and before every save. It compares objects, not values, so that sharding
    and loading are no changes. If a backend depends on dtypes and devices, it compares these too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._until_look = 1
        self._frozen = {p: name for name, p in model.named_parameters() if not p.requires_grad}
        self._forms = [(p, name, p.dtype, p.device) for name, p in model.named_parameters()]
        self._take_up()

    def look_now_and_then(self) -> bool:
        """Call `look` at the first step, then at every `STEPS_A_LOOK`th; return whether `look` was called."""
        self._until_look -= 1
        if self._until_look:
            return False
        self._until_look = STEPS_A_LOOK
        self.look()
        return True

    def look_at_unfrozen(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse a gradient of a parameter that was frozen at `prepare` and that no optimizer holds."""
        if unfrozen := [p for p in self._frozen if p.requires_grad and p.grad is not None]:
            held = {
                p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            }
            if lost := [self._frozen[p] for p in unfrozen if p not in held]:
                raise PairingError(
                    f"{list_some(lost)}: frozen when {type(self._model).__name__} was prepared, trained now, and "
                    "held by no prepared optimizer, so that nothing steps on the gradients. Freeze again what is not "
                    "to be trained; else free_memory(), and prepare() with an optimizer over all that is"
                )

    def look_at_forms(self, because: str, *, error: BaseException | None = None) -> None:
        """Refuse parameters that were converted or moved since the model was prepared."""
        changed = [form for form in self._forms if form[0].dtype is not form[2] or form[0].device != form[3]]
        if changed:
            p, _, old, where = changed[0]
            what = (
                f"from {str(old)[6:]} to {str(p.dtype)[6:]}"
                if p.dtype is not old
                else f"from {where} to {p.device}"
            )
            raise ReplacedParameterError(
                f"{list_some([name for _, name, *_ in changed])} of {type(self._model).__name__}: converted {what} "
                f"after prepare(), {because}. Convert and move a model before prepare(), or free_memory() and "
                "prepare() again; for an export or an evaluation, convert a copy"
            ) from error

    def look(self) -> None:
        """Refuse parameters that were added or removed since the model was prepared."""
        now = list(chain.from_iterable(map(dict[str, Any].values, self._slots)))
        if len(now) == len(self._held) and all(map(is_, now, self._held)):
            return
        present = {id(p): name for name, p in self._model.named_parameters()}
        new = [name for key, name in present.items() if key not in self._known]
        gone = [name for key, name in self._known.items() if key not in present]
        if not new and not gone:
            self._take_up()
            return
        changes = [f"{list_some(new)} created or assigned"] if new else []
        changes += [f"{list_some(gone)} replaced or taken out"] if gone else []
        raise ReplacedParameterError(
            f"the parameters of {type(self._model).__name__} are not those of prepare(): {'; '.join(changes)}. New "
            "ones are stepped by no optimizer and shared by no ranks. Change the model before prepare(), or "
            "free_memory() and prepare() again; values alone go in with parameter.copy_(...) under torch.no_grad()"
        )

    def _take_up(self) -> None:
        """Record the parameters and submodules that every module holds now."""
        modules = list(self._model.modules())
        self._slots: list[dict[str, Any]] = [
            held for module in modules for held in (parameters_in(module), modules_in(module))
        ]
        self._held: list[Any] = list(chain.from_iterable(map(dict[str, Any].values, self._slots)))
        self._known = {id(parameter): name for name, parameter in self._model.named_parameters()}


class Writes:
    """The writes to tensors since a moment, except through `.data`; None stands for a tensor not created yet."""

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors = tensors
        self._versions = self._now()

    def since(self) -> list[str]:
        """Return the names of tensors that were written to since this object was made, or since the last call."""
        before, self._versions = self._versions, self._now()
        if before == self._versions:
            return []
        pairs = zip(self._tensors, before, self._versions, strict=True)
        return [name for name, old, new in pairs if old != new and old is not None]

    def _now(self) -> list[int | None]:
        with as_they_are():
            return [None if tensor is None else version_of(tensor) for tensor in self._tensors.values()]
