"""Prepared loaders: drivetrain-data's loaders with the attributes that programs for Accelerate read."""
