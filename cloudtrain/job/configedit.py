"""Change one key of a target in cloudtrain.toml; comments and everything else stay as they are."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.job import configfile
from cloudtrain.job.homes import new_file
from cloudtrain.job.targets import CONFIG_FILE, config_files


def find_file(name: str, start: Path) -> Path:
    """Return the file that has a table for a target, the one that wins where several have; raises BadRequest."""
    for path in reversed(config_files(start)):
        if name in configfile.read(path).value.get("targets", {}):
            return path
    raise BadRequest(
        f"target {name} is not in {CONFIG_FILE}",
        f"add a table [targets.{name}], or run cloudtrain init -t BACKEND",
    )


def set_key(path: Path, target: str, key: str, value: str) -> None:
    """Write a key of a target into a file; raises BadRequest where the target is not a table of its own."""
    text = _with_key(path, target, key, value)
    path = path.resolve()  # a link stays a link
    with new_file(path) as file:
        file.write(text.encode())
        shutil.copymode(path, file.name)


def check_key(path: Path, target: str, key: str) -> None:
    """Raise BadRequest where `set_key` would."""
    _with_key(path, target, key, "")


def _with_key(path: Path, target: str, key: str, value: str) -> str:
    before = _parse(text := path.read_bytes().decode("utf-8"))
    lines = text.splitlines(keepends=True)
    after: dict[str, Any] = {}
    table = configfile.table_lines(text, ("targets", target))
    if table:
        entry = re.compile(rf"""(\s*["']?{re.escape(key)}["']?\s*=\s*)("[^"\\]*"|'[^']*')(.*)""", re.DOTALL)
        found = next(((number, match) for number in table if (match := entry.fullmatch(lines[number]))), None)
        if found:
            lines[found[0]] = found[1][1] + json.dumps(value) + found[1][3]
        else:
            last = max(
                number for number in table if lines[number].strip() and not lines[number].lstrip().startswith("#")
            )
            end = "\r\n" if lines[last].endswith("\r\n") else "\n"
            lines[last] = lines[last].rstrip("\r\n") + end
            lines.insert(last + 1, f"{key} = {json.dumps(value)}{end}")
        after = _parse("".join(lines))
        before["targets"][target][key] = value
    if after != before:
        raise BadRequest(
            f"{path} cannot be changed: [targets.{target}] is not a plain table",
            f'write {key} = "..." into it yourself',
        )
    return "".join(lines)


def _parse(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # of a changed text: it is not written
        return {}
