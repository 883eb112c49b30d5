"""What a user's script declares that it does itself: # cloudtrain: tp_size, or # cloudtrain: fsdp.

Nothing that a launcher sets makes a plain script split its layers: with tp_size 4 it would train four whole models, each
on other samples than its author thinks. A script that does it itself says so in a comment line. Strategies are made by
Accelerate, unless the script names them there:

    # cloudtrain: tp_size pp_size
    # cloudtrain: fsdp hsdp
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..errors import Refused
from ..manifest import OURS

AXES = ("tp_size", "pp_size", "cp_size")
SHARDED = ("fsdp", "hsdp", "zero1", "zero2", "zero3")
LINE = re.compile(r"^[^\S\n]*#\s*cloudtrain:(.*)$", re.MULTILINE)


def check(argv: Sequence[str], parallelism: Mapping[str, object], source: str) -> None:
    """Raise Refused for axes that the script does not declare."""
    asked = [axis for axis in AXES if int(str(parallelism.get(axis) or 1)) > 1]
    if not asked or argv[0].startswith(OURS):
        return
    name = " ".join(argv[:2]) if argv[0] == "-m" else argv[0]
    declared = declarations(argv, source)
    if missing := [axis for axis in asked if axis not in declared]:
        raise Refused(
            f"parallelism.{missing[0]} is {parallelism[missing[0]]}, but no code splits the model in {name}: "
            f"remove it, or declare in the script that it splits the model itself (# cloudtrain: {' '.join(missing)})"
        )
    strategy = parallelism.get("strategy")
    if strategy in SHARDED and strategy not in declared:
        raise Refused(
            f"strategy {strategy} of Accelerate cannot be combined with {asked[0]}: "
            f"remove one, or declare in {name} that the script does both itself (# cloudtrain: {strategy} {' '.join(asked)})"
        )


def left_to_accelerate(argv: Sequence[str], parallelism: Mapping[str, object], source: str) -> bool:
    """Return whether Accelerate is to carry out the job's strategy, or an Accelerate file, for a script of the user's."""
    if argv[0].startswith(OURS):
        return False
    strategy = parallelism.get("strategy")
    return bool(parallelism.get("accelerate_config")) or (
        strategy in SHARDED and strategy not in declarations(argv, source)
    )


def declarations(argv: Sequence[str], source: str) -> set[str]:
    """Return the words that the script declares; none for a module that is not in the source."""
    paths = [argv[0]]
    if argv[0] == "-m":
        path = argv[1].replace(".", os.sep)
        paths = [path + ".py", os.path.join(path, "__main__.py")]
    for path in paths:
        if os.path.isfile(os.path.join(source, path)):
            with open(os.path.join(source, path), encoding="utf-8", errors="replace") as file:
                return set(re.findall(r"\w+", " ".join(LINE.findall(file.read()))))
    return set()
