"""The backends `vertex` (custom jobs on Vertex AI) and `vertex-local` (the same jobs against a local simulator)."""
