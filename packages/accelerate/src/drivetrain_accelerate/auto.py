"""Install the interface by an import: `import drivetrain_accelerate.auto` as the first line of a program."""

from drivetrain_accelerate.installation import install

install()
