"""Runs the scripts of real entries again and writes what they say now: python -m tests.diagnosis.record ID...

The label stays as it is; its deciding line is looked for in the new log.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))  # as the tests' conftest does


def main(ids: list[str]) -> None:
    """Record the entries again; blocking."""
    from tests.diagnosis.entries import CORPUS, HERE, load
    from tests.diagnosis.reproduction import alike, reproduce

    for entry in load():
        if entry.id not in ids or entry.script is None or entry.launch is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = (HERE / entry.script).read_text(encoding="utf-8")
            log, end = reproduce(script, entry.launch, Path(folder))
        path = CORPUS / entry.part / f"{entry.id}.json"
        found = json.loads(path.read_text(encoding="utf-8")) | {"end": end, "log": log}
        said = [text for _, _, text in log] + end["reason"].split("\n")
        deciding = found["label"]["deciding"]
        if deciding is not None:
            found["label"]["deciding"] = next(text for text in said if alike(text) == alike(deciding))
        path.write_text(written(found), encoding="utf-8")
        print(entry.id, end["state"], end["exit_code"])


def written(entry: dict) -> str:
    """Return an entry's text: one line of the log a line of the file."""
    log = entry.pop("log")
    head = json.dumps(entry, indent=1, ensure_ascii=False)[:-2]
    lines = ",\n".join("  " + json.dumps(line, ensure_ascii=False) for line in log)
    return head + ',\n "log": [' + (f"\n{lines}\n " if log else "") + "]\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
