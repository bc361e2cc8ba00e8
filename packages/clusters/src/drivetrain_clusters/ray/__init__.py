"""Ray: a task's place from its driver, jobs by the Jobs API."""
