"""The choice between correct results and Accelerate's silent errors, which a comparison may need."""

from drivetrain_accelerate.settings import AccelerateSettings
from drivetrain_config import environ, resolve

# `install(strict=False)` says it by the variable, which the processes that this one starts inherit.
STRICT_VARIABLE = environ.override_name("accelerate", "strict")


def is_strict() -> bool:
    """Return whether to give correct results where Accelerate's are wrong.

    The call reads the settings and takes a fraction of a millisecond: call once per object, or in rare cases only.
    """
    return resolve(AccelerateSettings, section="accelerate").value.strict
