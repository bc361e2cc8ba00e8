"""The Accelerator: its methods, a module for each subject, and the module that builds its parts."""
