"""Vertex AI simulator: `python -m cloudtrain.simulators.vertex FOLDER`."""
