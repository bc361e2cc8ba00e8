"""The parts of a sharded model: blocks, slots, parameters that a program may use, weights gathered in fp8."""
