"""Write a PyTorch training loop once; run it on anything by changing the launch.

`Accelerator` stands between the loop and what it runs on. It is thin: each part is a package of its own, and this one
also hands on their public names.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator as Accelerator
    from drivetrain.plan import EffectivePlan as EffectivePlan
    from drivetrain.plan import PlanMismatchError as PlanMismatchError
    from drivetrain.plan import PlanRow as PlanRow
    from drivetrain.settings import RunSettings as RunSettings

_ROOMS = {
    "Accelerator": "accelerator",
    "EffectivePlan": "plan",
    "PlanMismatchError": "plan",
    "PlanRow": "plan",
    "RunSettings": "settings",
}
__all__ = [
    "Accelerator",
    "EffectivePlan",
    "PlanMismatchError",
    "PlanRow",
    "RunSettings",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
