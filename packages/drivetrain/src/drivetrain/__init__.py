"""Write a PyTorch training loop once; run it anywhere by changing the launch."""
