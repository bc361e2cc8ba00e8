"""Stand-ins for names of Accelerate's that have no counterpart: importing one is fine, using it is an error."""

from typing import Any, NoReturn

from drivetrain_accelerate.errors import NotProvidedError


class _Refusing(type):
    """The class of stand-ins: what is read from one, or asked of it, is an error too."""

    refusal: str

    def __call__(cls, *_: Any, **given: Any) -> NoReturn:
        named = f" (given: {', '.join(given)})" if given else ""
        raise NotProvidedError(f"{cls.refusal}{named}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and inspect look for
            raise AttributeError(name)
        raise NotProvidedError(cls.refusal)


def not_provided(full_name: str, reason: str) -> type:
    """Return a class that can be imported, subclassed and compared, and raises an error when it is used.

    Args:
        full_name: The name, such as "accelerate.utils.MegatronEngine".
        reason: The reason why it is not provided, and what to do instead.
    """
    module, _, name = full_name.rpartition(".")
    refusal = f"{full_name} is not provided by drivetrain_accelerate: {reason}"
    return _Refusing(name, (), {"__module__": module, "__doc__": refusal, "refusal": refusal})
