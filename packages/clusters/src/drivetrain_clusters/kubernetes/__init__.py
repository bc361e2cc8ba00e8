"""Kubernetes: a pod's place in its JobSet, jobs as manifests."""
