"""Prepared loaders with the attributes that programs for Accelerate read, over drivetrain-data's."""
