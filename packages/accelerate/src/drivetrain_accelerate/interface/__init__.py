"""The modules named `accelerate`: which there are, what each holds, and how imports find them."""
