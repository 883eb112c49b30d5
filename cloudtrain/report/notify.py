"""Says that a run has ended, failed, was preempted, uses no GPU or has a slow node, as cloudtrain.toml asks.

By a shell command or a webhook:

    [notify]
    on = ["end", "failure", "preemption", "idle", "straggler"] # which of them; all when it is left out
    command = "notify-send \\"$CLOUDTRAIN_RUN_ID $CLOUDTRAIN_STATE\\""
    webhook = "env:SLACK_WEBHOOK"                 # an address, or the variable that holds it

The watcher starts a process for it and does not wait. It is tried again for some minutes where it fails.
What is configured is read when it is needed and stored nowhere, since an address may be a secret itself; what is sent
holds no secret either: no environment, no argument, and no reason that looks like a credential.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest
from cloudtrain.events import REASON_CHARS, State, Status, show_marks
from cloudtrain.history.store import Store
from cloudtrain.job import configfile
from cloudtrain.job.targets import config_files
from cloudtrain.job.units import now
from cloudtrain.nodes.process import detach
from cloudtrain.source.secrets import SAFE_ADDRESS

PAUSES_S = (0.0, 2.0, 10.0, 60.0, 300.0)  # before each try
TIMEOUT_S = 30.0  # of one try
EVENTS = ("end", "failure", "preemption", "idle", "straggler")
_ALARMS = ("idle", "straggler")  # keys of a node's alarm
_FAILED = (State.FAILED, State.LOST, State.TIMED_OUT)


def event_of(status: Status, *, final: bool) -> str | None:
    """Return what there is to say of an attempt's status: the run's end, its failure, a preemption that it survives."""
    if status.state is State.PREEMPTED or (status.state is State.LOST and not final):
        return "preemption"
    if not final:
        return None
    return "failure" if status.state in _FAILED else "end"


def event_of_alarm(data: Mapping[str, Any]) -> str | None:
    """Return the event that a node's alarm is, None for one that is only shown."""
    return next((name for name in _ALARMS if name in data), None)


def start(
    store: Store,
    run_id: str,
    attempt_id: str,
    event: str,
    hidden: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Start a process that says so, once for each attempt and event; returns at once.

    `hidden` are variables of `environ` (None: this process's) that no other process may see. Nothing happens where nothing is
    configured.
    """
    if not _files(store, run_id) or not store.claim_notice(attempt_id, event):
        return
    folder = store.home / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    known = os.environ if environ is None else environ
    env = {name: value for name, value in known.items() if name not in hidden}
    command = [sys.executable, "-m", "cloudtrain.report.notify", str(store.home), run_id, attempt_id, event]
    detach(command, given=b"", log=folder / "notify.log", env=env, cwd=Path("/"))


def message(store: Store, run_id: str, attempt_id: str, event: str) -> dict[str, Any]:
    """Return what is sent."""
    from cloudtrain.diagnosis import record as verdict_record
    from cloudtrain.source import secrets

    record = store.find(run_id)
    attempt = next(candidate for candidate in store.attempts(run_id) if candidate.attempt_id == attempt_id)
    status = attempt.status if event == "preemption" else record.status
    if event in _ALARMS:
        alarms = [
            each.data for each in store.events(run_id, "alarm") if each.attempt == attempt_id and event in each.data
        ]
        status = replace(status, reason=str(alarms[-1].get("reason"))[:REASON_CHARS] if alarms else "")
    reason = "" if secrets.search(status.reason.encode("utf-8", "replace")) else status.reason
    ended = status.state.value + (f": {reason}" if reason else "")
    verdict = verdict_record.load_verdict(store, attempt) if event == "failure" else None
    why = verdict.sentence if verdict and verdict.label != "unknown" else ""
    sent = {
        "text": f"{run_id} {ended}" + (f"; {why}" if why else ""),  # what Slack and those like it show
        "event": event,
        "run_id": run_id,
        "name": record.name,
        "attempt": attempt.number,
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": reason,
        "why": why,
        "backend": record.backend,
        "target": record.target,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "url": status.url,
    }
    # What a job has named or printed is shown by programs that draw direction marks.
    return {name: show_marks(value) if isinstance(value, str) else value for name, value in sent.items()}


def settings(files: Sequence[Path]) -> dict[str, Any]:
    """Return the `[notify]` tables of some configuration files, of which the later ones win key by key."""
    notify: dict[str, Any] = {}
    for path in files:
        notify.update(configfile.read(path).value.get("notify") or {})
    return notify


def send(settings: Mapping[str, Any], data: Mapping[str, Any], clock: Clock = SYSTEM) -> list[str]:
    """Say it in every configured way at once, each tried again where it fails; return what did not work.

    Blocking, for minutes.
    """
    if data["event"] not in (settings.get("on") or EVENTS):
        return []
    from concurrent.futures import ThreadPoolExecutor

    channels = [(kind, deliver) for kind, deliver in (("command", _run), ("webhook", _post)) if settings.get(kind)]
    with ThreadPoolExecutor(len(channels) or 1) as pool:  # none waits for another, which may fail for minutes
        deliveries = [
            pool.submit(_tried, kind, deliver, str(settings[kind]), data, clock) for kind, deliver in channels
        ]
    return [problem for delivery in deliveries if (problem := delivery.result())]


def _tried(
    kind: str, deliver: Callable[[str, Mapping[str, Any]], str], where: str, data: Mapping[str, Any], clock: Clock
) -> str:
    """Say it in one way until it works; return what went wrong, or an empty string. Blocking, for minutes."""
    problem = ""
    for pause_s in PAUSES_S:
        clock.sleep(pause_s)
        problem = deliver(where, data)
        if not problem:
            return ""
    return f"the {kind} failed {len(PAUSES_S)} times: {problem}"


def _run(command: str, data: Mapping[str, Any]) -> str:
    """Run a shell command with the message on its standard input and in its environment; return what went wrong."""
    variables = {f"CLOUDTRAIN_{name.upper()}": "" if value is None else str(value) for name, value in data.items()}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], input=json.dumps(data).encode(), env={**os.environ, **variables}, timeout=TIMEOUT_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    return f"it ended with {done.returncode}" if done.returncode else ""


def _post(address: str, data: Mapping[str, Any]) -> str:
    """Post the message as JSON; return what went wrong, without the address, which may be a secret."""
    if address.startswith("env:"):
        address = os.environ.get(address[4:], "")
        if address and not re.match(SAFE_ADDRESS, address):
            return "the address that the variable holds is sent unencrypted: write https://, or http:// to this machine"
    if not address.startswith(("https://", "http://")):
        return "no http address is set"
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        address, json.dumps(data).encode(), {"Content-Type": "application/json", "User-Agent": "cloudtrain"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return "" if answer.status < 300 else f"HTTP {answer.status}"
    except Exception as error:  # an address that is none, a name that is not known, a refusal
        return f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__


def _files(store: Store, run_id: str) -> list[Path]:
    """Return the configuration files in force when the run was submitted that ask for notifications."""
    named = store.provenance(run_id).get("configuration")
    paths = [Path(path) for path in named] if isinstance(named, list) else config_files(Path("/"))
    wanted = []
    for path in paths:
        try:
            # Most files hold no such word, and need not be parsed: TOML has many ways to write a table.
            if b"notify" in path.read_bytes() and configfile.read(path).value.get("notify"):
                wanted.append(path)
        except BadRequest:
            wanted.append(path)  # what is wrong with it is said in notify.log
        except OSError:
            continue  # gone since then
    return wanted


def main() -> int:
    """Say it: `python -m cloudtrain.report.notify HOME RUN ATTEMPT EVENT`."""
    home, run_id, attempt_id, event = sys.argv[1:5]
    store = Store(Path(home))
    try:
        problems = send(settings(_files(store, run_id)), message(store, run_id, attempt_id, event))
    except BadRequest as error:
        problems = [str(error)]
    for problem in problems:
        print(f"{now()} {event}: {problem}", file=sys.stderr)  # noqa: T201 - its own log
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
