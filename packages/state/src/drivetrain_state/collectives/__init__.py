"""Communicate nested data between ranks, and run code on some of them."""
