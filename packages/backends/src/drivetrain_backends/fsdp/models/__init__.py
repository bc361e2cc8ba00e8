"""What a sharded model is made of: blocks and slots, parameters that a program may use, and what outlasts a run."""
