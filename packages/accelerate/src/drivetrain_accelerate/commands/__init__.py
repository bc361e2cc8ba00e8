"""Accelerate's commands on drivetrain, and what programs import of them."""
