"""Lets the tests import the entrypoints as they import each other on a node."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))
