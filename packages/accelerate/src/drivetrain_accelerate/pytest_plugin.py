"""Install the interface before tests are collected: `pytest -p drivetrain_accelerate.pytest_plugin`.

It is no entry point of pytest's, which would install the interface for every suite of the environment.
"""

from drivetrain_accelerate.installation import install

install()
