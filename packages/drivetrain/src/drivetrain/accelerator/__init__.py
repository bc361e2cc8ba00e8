"""The Accelerator: its methods by subject, and how it is composed."""
