"""One tracker interface over many platforms; a JSONL tracker without dependencies."""
