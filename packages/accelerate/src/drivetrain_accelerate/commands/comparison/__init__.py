"""Compare a program's losses under the real Accelerate and under the interface."""
