"""Plan a device map: sizes, budgets and bandwidths in, a placement and its predicted time out."""
