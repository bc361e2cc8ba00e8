"""The choice whether what Accelerate does wrong without a word is put right, or restored for a comparison."""

from drivetrain_accelerate.settings import AccelerateSettings
from drivetrain_config import environ, resolve

# `install(strict=False)` says it by the variable, which the processes that this one starts inherit.
STRICT_VARIABLE = environ.override_name("accelerate", "strict")


def is_strict() -> bool:
    """Return whether drivetrain's own results are wanted where Accelerate's are wrong.

    It reads the settings, which takes a fraction of a millisecond: ask once for each object or rare case.
    """
    return resolve(AccelerateSettings, section="accelerate").value.strict
