"""The drivetrain command: launch, env, test; notebook launcher."""
