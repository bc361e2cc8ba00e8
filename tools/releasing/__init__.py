"""A release of all packages of the workspace: what it changes, what it checks, and how it is carried out."""
