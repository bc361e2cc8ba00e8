"""The exact peak memory of a block: of this process, its children and each device."""
