"""Run the drivetrain command as `python -m drivetrain_launcher`, where its script is not on the path."""

import sys

from drivetrain_launcher.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
