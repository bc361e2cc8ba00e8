"""Plan where a model goes, before anything is loaded."""
