"""Plan a device map: from sizes, budgets and bandwidths to a placement and its predicted time."""
