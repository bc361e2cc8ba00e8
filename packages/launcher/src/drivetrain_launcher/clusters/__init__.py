"""Clusters as plug-ins: what a job is told by Slurm, MPI, Kubernetes or Ray, and how a job is submitted to one."""
