"""The model to train: built without memory, with the inputs of a step, and shortened to a few of its blocks."""
