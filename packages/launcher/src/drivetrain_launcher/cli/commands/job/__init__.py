"""Follow or cancel a job that `drivetrain submit` has submitted."""
