"""A backend that the settings leave to the planner, until the first model is prepared."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.parts.sections import Sections
from drivetrain_backends import AccumulationWindow, Backend, BackendRegistry
from drivetrain_config import ConfigError

if TYPE_CHECKING:  # a run that names its backend plans nothing
    from drivetrain_plan import PlanChoice

AUTO = "auto"
# The settings of a backend's section that a choice sets; unset, they are "none", or False.
_PLANNED = ("strategy", "stage", "offload", "offload_optimizer", "offload_param")


def leaves_open(settings: Any) -> bool:
    """Return whether a backend's settings leave something to the planner."""
    return settings is not None and any(getattr(settings, each.name) == AUTO for each in fields(settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBackend:
    """A backend that is not chosen yet, by what the settings say of it.

    Attributes:
        sections: The sections of the run.
        registry: The backends by name.
        named: The backend that the run names, whose section leaves something open; None if the run names none.
        make: Makes a backend for a window and the settings of its section.
        on_chosen: Called once the backend is chosen.
    """

    sections: Sections
    registry: BackendRegistry
    named: type[Backend] | None
    make: Callable[[type[Backend], AccumulationWindow, Any], Backend]
    on_chosen: Callable[[], None]

    def building(self) -> AbstractContextManager[Any]:
        """Create parameters in the block on the host, from where any backend takes them."""
        return torch.device("cpu")

    def pins(self) -> Mapping[str, Any]:
        """Return what the named backend's section and the model's fix of the plan; unsaid settings are free."""
        from drivetrain_plan import pins_of

        model, name = self.sections.resolved["model"], "activation_checkpointing"
        own = {} if model.sources[name].kind == "default" else {"checkpointing": getattr(model.value, name)}
        if self.named is None:
            return own
        section = self._section_of(self.named)
        known = self.sections.resolved[section]
        said = {name for name, source in known.sources.items() if source.kind != "default"}
        return own | pins_of(
            section, {name: value for name in said if (value := getattr(known.value, name)) != AUTO}
        )

    def allows(self, choice: "PlanChoice") -> bool:
        """Return whether a choice keeps what the named backend's section says, and needs no unsaid folder on NVMe."""
        if self.named is None:
            return choice.offload != "nvme"
        known = self.sections.resolved[section := self._section_of(self.named)]
        values = choice.sections().get(section, {})
        if "nvme_path" in values and getattr(known.value, "nvme_path", None) is None:
            return False
        said = {name for name in _PLANNED if name in known.sources and known.sources[name].kind != "default"}
        wanted = {name: getattr(known.value, name) for name in said}
        return all(
            value == AUTO or (values.get(name) or "none") == (value or "none")
            for name, value in wanted.items()
        )

    def backend_of(self, choice: "PlanChoice", window: AccumulationWindow) -> tuple[Backend, tuple[str, ...]]:
        """Return the backend of a choice, and the names of the settings that the choice has set.

        Raises:
            ConfigError: A setting of its section is said, and contradicts the choice.
        """
        kind = self.named or self.registry.get(choice.backend)
        section = kind.settings_section
        if section is None:
            return self.make(kind, window, None), ()
        if self.named is None:
            self.sections.of_backend(kind)
        known = self.sections.resolved[section]
        values = choice.sections().get(section, {})
        values.pop("nvme_path", None)  # `allows` has asked for the user's own
        for name, value in values.items():
            said = getattr(known.value, name)
            if known.sources[name].kind != "default" and said not in (AUTO, value):
                raise ConfigError(
                    f"{known.sources[name]}: {section}.{name}={said!r}, and backend='auto' has chosen "
                    f"{choice.name}, with {value!r}: leave it out, or name backend={section!r} with what is to be "
                    "chosen at 'auto'"
                )
        unsaid = {
            one.name: one.default for one in fields(known.value) if getattr(known.value, one.name) == AUTO
        }
        settings = replace(known.value, **{**unsaid, **values})
        return self.make(kind, window, settings), tuple(f"{section}.{name}" for name in values)

    def _section_of(self, kind: type[Backend]) -> str:
        assert kind.settings_section is not None  # it leaves something open
        return kind.settings_section
