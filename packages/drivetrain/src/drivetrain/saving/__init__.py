"""Save and resume runs; export models to other programs and load their exports."""
