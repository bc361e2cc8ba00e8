"""Install the interface before tests are collected: `pytest -p drivetrain_accelerate.pytest_plugin`.

The plugin is no entry point, since pytest would then install the interface for every suite of the environment.
"""

from drivetrain_accelerate.installation import install

install()
