"""The memory that is used now, from each source: processes, their cgroup, torch's allocators, device drivers."""
