"""The writer process: `python -m drivetrain_tracking.forwarding LOG TRACKER --parent PID ...`."""

import sys

from drivetrain_tracking.forwarding.writer_main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
