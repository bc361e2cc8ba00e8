"""fp16, bf16 and loss scaling chosen for the hardware."""
