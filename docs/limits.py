"""The table of docs/cost.md: what ends an attempt on each backend, from the requests that its planner makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.job.job import Job
from cloudtrain.job.units import format_duration
from cloudtrain.runs.planning import cap
from cloudtrain.source.bundle import Bundle, File

PAGE = Path(__file__).parent / "cost.md"
BEGIN, END = "<!-- table: written by docs/generate.py from the plans of docs/limits.py -->", "<!-- end of the table -->"
ROLE = "arn:aws:iam::123456789012:role/train"
# backend -> options, and from when its limit counts
BACKENDS: dict[str, tuple[dict[str, Any], str]] = {
    "sagemaker": ({"region": "us-east-1", "role": ROLE, "bucket": "my-bucket"}, "the job's start, downloads included"),
    "vertex": ({"project": "p", "region": "us-central1", "bucket": "my-bucket"}, "the job's start"),
    "kubernetes": ({"spot_selector": {"spot": "true"}}, "the pod's start on a node"),
    "slurm": ({"folder": "/shared", "spot_partition": "cheap"}, "the allocation"),
    "ssh": ({"hosts": [{"address": "one"}]}, "the ranks' start"),
    "local": ({}, "the ranks' start"),
}
# Parts of a request that hold the manifest or a name, and no limit of the platform's.
# The Job's own deadline waits for nodes.
OTHERS = re.compile(r"HyperParameters|\.env\b|env\[|script|TrainingJobName|Tags|manifests\[0\]\.spec\.activeDeadline")


def page() -> str:
    """Return the page with the table as the planner makes it."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return "\n".join([head + BEGIN, "", *table(), "", END + rest.partition(END)[2]])


def table() -> list[str]:
    """Return the table's lines."""
    rows = [
        "| backend | what ends an attempt of `max_runtime: 1h` | counted from | at most | under a cap | not in it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (_, counted) in BACKENDS.items():
        plan, longer, capped = planned(name), planned(name, max_runtime="2h"), planned(name, max_total_runtime="99h")
        limit = cap.limit_of(_backend(name), capped)
        native = [text for path, text in leaves(plan.request) if text != dict(leaves(longer.request)).get(path)]
        before, after = dict(leaves(plan.request)), dict(leaves(capped.request))
        changed = [text for path, text in after.items() if text != before.get(path) and text not in before.values()]
        at_most = format_duration(limit.seconds or 0)
        native = native or ["the launcher's own clock"]
        rows.append(f"| `{name}` | {_joined(native)} | {counted} | {at_most} | {_joined(changed)} | {limit.note} |")
    return rows


def planned(name: str, **limits: str) -> Plan:
    """Return the plan of a job of one hour and three attempts."""
    fields: dict[str, Any] = {"name": "x", "source": "/", "entrypoint": "train.py", "retry": {"max_attempts": 3}}
    if name in ("sagemaker", "vertex", "kubernetes"):
        fields["image"] = "img:1"
    if name == "sagemaker":
        fields["resources"] = {"accelerators": "A10G:1"}
    job = Job.from_dict({**fields, "limits": {"max_runtime": "1h", **limits}})
    bundle = Bundle(Path("x.tar.gz"), "5" * 64, "6" * 64, 1000, (File("train.py", 1, 0o644),), None, False, "/")
    return cap.plan_attempt(_backend(name), job, bundle, "x")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each value in a request that may be a limit."""
    if OTHERS.search(path):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        name = path.rpartition(".")[2]
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        yield path, shown if shown.startswith("--") else f"{name}: {shown}"


def _backend(name: str) -> Any:
    return registry.create(name, BACKENDS[name][0], Path("/nowhere"))


def _joined(texts: list[str]) -> str:
    return ", ".join(text if text.startswith("the ") else f"`{text}`" for text in dict.fromkeys(texts))
