"""Parse the command line: drivetrain's own flags, and the flags of Accelerate and torchrun."""
