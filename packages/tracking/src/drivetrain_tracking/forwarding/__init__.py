"""Send a run's log to a platform, from a process beside the training: in order, each record at least once.

The writer process of a platform runs a `Forwarder`, which delivers the records; `Delivery` is how far it is.
"""
