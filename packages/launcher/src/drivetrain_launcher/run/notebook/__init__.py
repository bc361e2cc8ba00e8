"""Run a function of a notebook on several processes: fresh interpreters that the notebook talks to."""
