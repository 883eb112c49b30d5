"""The page docs/troubleshooting.md: what a log says, what happened and what to try, from the classes of failures and the corpus."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES, WIDTH = 4, 150
HEAD = """\
# Troubleshooting

Search this page for what your log says. Each heading is what happened; below it stand lines as libraries and platforms print them, and what to try.

`cloudtrain show RUN` does this search for you: it prints the line that decided, the cause and what to try. Run it first. For a run that waits
or hangs without an error, read [Why it waits](watching.md#why-it-waits) and [A run that hangs](how/hang.md).
`cloudtrain doctor TARGET` looks for what is wrong before a submit.
"""

# What a class needs besides its row: searched for by what cloudtrain prints itself, and what to do in order.
MORE = {
    "host-memory": (
        ("OOMKilled",),
        """
A killed process has this class where the log or the platform names memory, such as Kubernetes' OOMKilled. Where neither says why, the class is
[`signal`](#a-process-was-killed-by-a-signal-and-the-log-has-no-reason), and memory is the most frequent cause (exit code 137). What to do about memory:

1. See how much each node used: `cloudtrain ls --columns run,system.memory`, or `cloudtrain top RUN` while it runs.
2. Use fewer data loader workers (`num_workers`): each one has its own copy of what it reads.
3. Read the data in pieces (`streaming`, memory-mapped files), or use a smaller batch.
4. Ask for more: `resources: {memory: 64GiB}`, or a larger instance type.

`cloudtrain resume RUN --set resources.memory=64GiB` continues from the newest checkpoint with the same code. On `local` and over SSH, `resources.memory` has no effect: use a
machine with more. `cloudtrain rerun RUN --source .` starts a new run with changed code.""",
    ),
    "signal": (
        (
            "FAILED with exit code 137 after 12m: rank 0 was killed by signal 9 (SIGKILL)",
            "rank 0 was killed by signal 11 (SIGSEGV)",
        ),
        """
That is for SIGSEGV, SIGBUS, SIGILL and SIGABRT. At SIGKILL (exit code 137 is 128 + 9) a process cannot write anything. Check the machine's memory (`dmesg`): mostly the kernel's OOM
killer sent it, see [out of memory on the machine](#out-of-memory-on-the-machine). A person or a scheduler can send it too.""",
    ),
    "left-early": (
        ("rank 0 exited with code 1; rank 1 had ended with 0", "rank 1 has ended with 0, rank 0 still runs"),
        "",
    ),
    "capacity": (
        (),
        """
Let cloudtrain try the others itself: name several targets (`target: [prod, gke]`) or several GPUs, and [the run moves](capacity.md) to the next one. `retry: {max_attempts: 5}` begins
again with the first one when all have refused. `limits.max_wait` says [how long a request may wait](watching.md#what-bounds-the-wait).""",
    ),
}


def page(written: str) -> str:
    """Return the text of the page; `written` is the line that says who wrote it."""
    classes = tomllib.loads((ROOT / "cloudtrain" / "diagnosis" / "classes.toml").read_text("utf-8"))
    seen: dict[str, dict[str, str]] = defaultdict(dict)  # class -> line without its numbers -> line
    rows = dict(_with_cases(classes))
    for path in sorted((ROOT / "tests" / "diagnosis" / "corpus" / "known").glob("*.json")):
        label = json.loads(path.read_text("utf-8"))["label"]
        if label["deciding"]:
            line = " ".join(label["deciding"].split())
            cases = enumerate(classes[label["class"]].get("cases", ()), 1)
            case = next((number for number, case in cases if re.search(case["pattern"], line)), 0)
            seen[label["class"] + f"/{case}" * bool(case)].setdefault(re.sub(r"\d+", "", line[:WIDTH]), line)
    parts = [HEAD.rstrip(), "", written]
    for key, row in rows.items():
        name = key.partition("/")[0]
        samples, text = MORE.get(key, ((), ""))
        if not seen[key] and not samples:
            continue
        cause, fix = row["cause"], row.get("fix", "")
        parts += ["", f"## {cause[0].upper()}{cause[1:]}", "", "```"]
        for line in sorted(seen[key].values(), key=lambda text: (len(text), text))[:LINES]:
            parts.append(line if len(line) <= WIDTH else line[: WIDTH - 4].rstrip() + " ...")
        parts += samples
        parts += ["```", ""]
        changes = " This changes the results." if row.get("changes_results") else ""
        parts.append(f"Class `{name}`." + (f" Try: {fix}.{changes}" if fix else ""))
        parts += [text] if text else []
    return "\n".join(parts) + "\n"


def _with_cases(classes: dict[str, dict]) -> Iterator[tuple[str, dict]]:
    """Yield each class, then its cases as class/1 and so on."""
    for name, row in classes.items():
        yield name, row
        yield from ((f"{name}/{number}", row | case) for number, case in enumerate(row.get("cases", ()), 1))
