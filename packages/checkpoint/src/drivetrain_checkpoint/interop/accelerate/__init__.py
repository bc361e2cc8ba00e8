"""Read what Hugging Face Accelerate's `save_state` wrote, without running any code of it."""
