"""Store checkpoint files on a local disk or in an object store, behind one protocol."""
