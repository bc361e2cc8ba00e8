"""Count the floating point operations of a step, and find the peak of the device: the two parts of MFU."""
