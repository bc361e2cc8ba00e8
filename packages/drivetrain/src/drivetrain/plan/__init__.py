"""The effective plan: requested settings compared with the applied ones."""
