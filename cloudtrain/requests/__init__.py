"""A job as the native request of a platform: pure data, made without network, clock or SDK."""
