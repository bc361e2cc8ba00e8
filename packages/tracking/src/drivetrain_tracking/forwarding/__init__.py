"""Send a run's log to a platform from a process beside the training, each record in order and at least once.

The writer process of a platform runs a `Forwarder`, which delivers the records; a `Delivery` holds its progress.
"""
