"""The findings of the doctor, as a table for people and as JSON for programs."""
