"""Run Accelerate's commands on drivetrain.

Its modules also hold the names that programs import from Accelerate's command modules.
"""

TOPIC = "Migrate"  # in `drivetrain --help`
