"""The exit codes by which ranks tell their launcher more than that they failed."""

# The exit code of a rank that has saved on a signal and asks for a restart: EX_TEMPFAIL of sysexits.h.
RESUME_EXIT_CODE = 75
