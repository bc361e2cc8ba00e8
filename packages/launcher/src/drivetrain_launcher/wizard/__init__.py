"""The questions of `drivetrain config`: planned from the settings and the machine, asked, and written as YAML."""
