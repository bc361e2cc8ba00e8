"""Accelerate's commands on drivetrain, and the names that programs import from Accelerate's command modules."""
