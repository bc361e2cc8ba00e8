"""MPI: a task's place from what its starter sets; batch jobs around mpirun are the queue's."""
