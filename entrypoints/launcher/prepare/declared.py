"""Check that a user's script declares model parallelism (# cloudtrain: tp_size) before it is asked for.

Nothing that a launcher sets makes a plain script split its layers: with tp_size 4 it would train four whole models, each
on other samples than its author thinks. A script that does it itself says so in a comment line:

    # cloudtrain: tp_size pp_size
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..errors import Refused

AXES = ("tp_size", "pp_size", "cp_size")
OURS = ".cloudtrain/"
LINE = re.compile(r"^\s*#\s*cloudtrain:(.*)$", re.MULTILINE)


def check(argv: Sequence[str], parallelism: Mapping[str, object], source: str) -> None:
    """Raise Refused for axes that the script does not declare."""
    asked = [axis for axis in AXES if int(str(parallelism.get(axis) or 1)) > 1]
    if not asked or argv[0].startswith(OURS):
        return
    name = " ".join(argv[:2]) if argv[0] == "-m" else argv[0]
    declared = set(re.findall(r"\w+", " ".join(LINE.findall(_text(argv, source)))))
    if missing := [axis for axis in asked if axis not in declared]:
        raise Refused(
            f"parallelism.{missing[0]} is {parallelism[missing[0]]}, but nothing splits the model of {name}: "
            f"leave it out, or say in the script that it does so itself (# cloudtrain: {' '.join(missing)})"
        )


def _text(argv: Sequence[str], source: str) -> str:
    """Return the script, or "" for a module that is not in the source."""
    paths = [argv[0]]
    if argv[0] == "-m":
        path = argv[1].replace(".", os.sep)
        paths = [path + ".py", os.path.join(path, "__main__.py")]
    for path in paths:
        if os.path.isfile(os.path.join(source, path)):
            with open(os.path.join(source, path), encoding="utf-8", errors="replace") as file:
                return file.read()
    return ""
