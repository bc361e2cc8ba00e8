"""Run a program with the interface installed: `python -m drivetrain_accelerate SCRIPT [ARGUMENT ...]`.

`-m MODULE` in place of the script runs a module, as with Python itself. `--no-strict` before the script or `-m`
restores Accelerate's silent errors, for a comparison.
"""

import sys
from typing import NoReturn

from drivetrain_accelerate.installation import install
from drivetrain_config import ConfigError
from drivetrain_launcher.run.runpy_main import run_as_main

USAGE = "usage: python -m drivetrain_accelerate [--strict | --no-strict] (SCRIPT | -m MODULE) [ARGUMENT ...]"
_STRICT = {"--strict": True, "--no-strict": False}


def main() -> None:
    """Install the interface and run the program that the command line names."""
    arguments = sys.argv[1:]
    strict: bool | None = None
    while arguments[:1] and arguments[0] in _STRICT:
        strict = _STRICT[arguments.pop(0)]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if arguments else 2)
    if not is_module and arguments[0].startswith("-"):
        _refuse(f"{arguments[0]}: there is no such flag; {USAGE}")
    try:
        install(strict=strict)
    except ConfigError as error:
        _refuse(str(error))
    run_as_main(arguments[0], arguments[1:], is_module=is_module)


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"drivetrain_accelerate: error: {message}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
