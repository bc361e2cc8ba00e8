"""The values that an Accelerator is made of, which every other folder reads."""
