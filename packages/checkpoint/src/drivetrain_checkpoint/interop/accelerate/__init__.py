"""Read the output of Hugging Face Accelerate's `save_state` without running any code in it."""
