"""Simulates Azure Machine Learning: a workspace whose jobs run as processes of this machine, with its Blob Storage."""
