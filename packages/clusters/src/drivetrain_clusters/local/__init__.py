"""This machine as a cluster: jobs are detached scripts."""
