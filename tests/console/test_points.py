"""README.md beside this file names a test for each point that users of experiment trackers expect; the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_point_has_a_test():
    text = (Path(__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| `([^`]+)::(test_\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| \d", text, re.MULTILINE)) >= 52
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for number, what, path, name in rows:
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in names, f"point {number}, {what}: {path} has no {name}"
