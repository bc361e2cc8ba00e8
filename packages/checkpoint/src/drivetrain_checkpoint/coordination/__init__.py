"""Have all ranks succeed or fail together, without a collective."""
