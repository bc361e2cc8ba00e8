"""The parts of an Accelerator; the modules of all other folders use them."""
