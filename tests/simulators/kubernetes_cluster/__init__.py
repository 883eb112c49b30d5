"""Kubernetes simulator whose pods are local processes."""
