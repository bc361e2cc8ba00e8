"""The Accelerator of Accelerate's interface, built on drivetrain's; its methods are grouped into files by purpose."""
