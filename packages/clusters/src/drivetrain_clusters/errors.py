"""The error of a cluster."""


class ClusterError(ValueError):
    """A job that a cluster cannot run, find or place; the message gives the value, the limits and a remedy."""
