"""Azure Machine Learning: command jobs over its REST API, with Azure Blob Storage as their store."""
