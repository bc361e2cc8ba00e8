"""Training for quantised inference: layers that round weights as inference will, and their export."""
