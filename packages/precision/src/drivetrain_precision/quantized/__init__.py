"""Training for quantised inference: layers that round their weights as inference will, and their export."""
