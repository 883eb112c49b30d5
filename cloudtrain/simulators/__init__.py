"""Loopback simulators of SageMaker, Vertex AI and Kubernetes that really execute jobs, for local modes and tests."""
