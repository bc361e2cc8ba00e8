"""The search among plans, by arithmetic on figures. Pure."""
