"""The backend `akash`: deployments on the Akash network, through the Console API."""
