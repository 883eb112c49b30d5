"""Check what a submission to Akash needs: the API key, the Console's answer, the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.backends.akash.client import Console, read_key
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.store.s3 import S3
from cloudtrain.errors import CloudtrainError, Problem


def check(console: Console, aws: Aws, options: Mapping[str, Any]) -> list[Problem]:
    """Return the problems that would stop a submission; blocking."""
    problems = [
        Problem("is not set", f"options.akash.{name}", "a target in cloudtrain.toml, or the job file")
        for name in ("store", "max_usd_per_hour")
        if not options.get(name)
    ]
    checks: list[Callable[[], object]] = []
    try:
        read_key(str(options.get("api_key") or "env:AKASH_API_KEY"))
        checks.append(lambda: next(iter(console.deployments()), None))
    except CloudtrainError as error:
        problems.append(Problem(error.message, "options.akash.api_key", error.hint))
    if store := str(options.get("store") or ""):
        checks.append(lambda: next(S3(aws, store).objects("akash/doctor"), None))
    for look in checks:
        try:
            look()
        except CloudtrainError as error:
            problems.append(Problem(error.message, "", error.hint))
    return problems


def capacity(console: Console) -> str:
    """Return one sentence on the network's free GPUs; blocking. Raises BackendError."""
    gpus = console.gpus().get("gpus") or {}
    details = (gpus.get("details") or {}).get("nvidia") or []
    rows: dict[str, list[int]] = {}
    for row in details:
        total = rows.setdefault(f"{row.get('model')} {row.get('ram') or ''}".strip(), [0, 0])
        total[0] += int(row.get("allocatable") or 0) - int(row.get("allocated") or 0)
        total[1] += int(row.get("allocatable") or 0)
    free = sorted(((count[0], name, count[1]) for name, count in rows.items()), reverse=True)
    text = ", ".join(f"{count} of {whole} x {name}" for count, name, whole in free[:8] if count > 0)
    return f"free on the network now: {text}" if text else "no GPU is free on the network now"
