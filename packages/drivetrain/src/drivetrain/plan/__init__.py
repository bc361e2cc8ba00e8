"""The effective plan: what was asked against what is applied, and settings that nothing reads."""
