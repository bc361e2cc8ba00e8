"""`python -m drivetrain_launcher`: the drivetrain command where no script for it is on the path."""

import sys

from drivetrain_launcher.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
