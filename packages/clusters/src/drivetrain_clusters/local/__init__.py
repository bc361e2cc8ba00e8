"""The cluster that is this machine: jobs are detached scripts."""
