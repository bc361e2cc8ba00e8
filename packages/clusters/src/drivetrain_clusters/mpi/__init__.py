"""MPI: a task's place from the variables of its starter. The queue handles batch jobs around mpirun."""
