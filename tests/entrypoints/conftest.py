"""Lets the tests import the entrypoints as they import each other on a node."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ENTRYPOINTS = Path(__file__).resolve().parents[2] / "entrypoints"
sys.path[:0] = [str(ENTRYPOINTS), str(ENTRYPOINTS / "path")]
sys.modules["cloudtrain_fence"] = importlib.import_module("launcher.fence")  # as a bundle has it
