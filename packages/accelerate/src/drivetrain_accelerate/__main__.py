"""Run a program with the interface installed: `python -m drivetrain_accelerate SCRIPT [ARGUMENT ...]`.

`-m MODULE` in place of the script runs a module, as with Python itself.
"""

import sys

from drivetrain_accelerate.installation import install
from drivetrain_accelerate.launch_variables import launch_variables
from drivetrain_config import Layers, environ
from drivetrain_launcher.run.runpy_main import run_as_main

USAGE = "usage: python -m drivetrain_accelerate (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main() -> None:
    """Install the interface and run the program that the command line names.

    Raises:
        SystemExit: The command line names no program (code 2), or the program exits.
    """
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if arguments else 2)
    install()
    with environ.exported(**launch_variables(Layers.of_process())):
        run_as_main(arguments[0], arguments[1:], is_module=is_module)


if __name__ == "__main__":
    main()
