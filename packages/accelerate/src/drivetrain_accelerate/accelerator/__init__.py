"""The Accelerator of Accelerate's interface, over drivetrain's: a file for the methods of each concern."""
