"""Simulates the Akash Console API, its market and the providers, which run services as processes of this machine."""
