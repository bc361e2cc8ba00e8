"""Parse the command line, with drivetrain's own flags and those of Accelerate and torchrun."""
