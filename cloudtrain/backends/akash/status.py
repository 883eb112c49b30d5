"""Decide the status of an attempt from its record in the output, its containers' reports, and its lease; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.akash import bids
from cloudtrain.events import EXIT_RESUMABLE, State, Status
from cloudtrain.job.units import format_duration, format_time, unix_time

CONSOLE = "https://console.akash.network/deployments/{dseq}"
UPLOAD_S = 900.0  # how long other nodes may upload behind the end that node 0 has written
UNBEGUN_S = 5.0  # how long a container may take to report its start, behind the end of a lease in which none has begun
LOST_CODE = 69  # the launcher's, where a node is gone (entrypoints/launcher/world/outcome.py)


@dataclass(frozen=True)
class Seen:
    """What is seen of an attempt at one moment.

    Attributes:
        now: the Console's time, seconds since 1970.
        lease: what `submit` stored.
        deployment: the Console's answer, None where it knows none.
        record: the newest history record in the output, {} before the launcher wrote one.
        reports: node -> what its container reported at its end.
        began: whether a container reported its start.
        cancelled: whether somebody asked for the end.
        ending_at: when an end of the job or of its lease was first seen.
    """

    now: float
    lease: Mapping[str, Any]
    deployment: Mapping[str, Any] | None
    record: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    began: bool = False
    cancelled: bool = False
    ending_at: float | None = None

    @property
    def chain_lease(self) -> Mapping[str, Any] | None:
        """The lease as the chain has it, the newest one."""
        leases = (self.deployment or {}).get("leases") or ()
        return leases[-1] if leases else None

    @property
    def open(self) -> bool:
        """Whether the deployment and its lease are billed."""
        lease = self.chain_lease
        active = (self.deployment or {}).get("deployment", {}).get("state") == "active"
        return bool(active and lease and lease["state"] in ("active", "reclaiming"))


def judge(seen: Seen, *, lost_after_s: float, settle_s: float) -> Status:
    """Return the attempt's status."""
    url = CONSOLE.format(dseq=seen.lease["dseq"])
    started_at = seen.record.get("started_at")
    end = _reported_end(seen)
    ending_s = seen.now - (seen.ending_at if seen.ending_at is not None else seen.now)
    if not seen.began:
        settle_s = min(settle_s, UNBEGUN_S)  # nothing runs that could write a log
    if end and (len(seen.reports) >= int(seen.lease["nodes"]) or ending_s >= (UPLOAD_S if seen.open else settle_s)):
        return _final(seen, *end)
    if end:
        return Status(State.STOPPING, None, "nodes upload their results", started_at, url=url)
    if not seen.open or seen.cancelled:
        if ending_s < settle_s:  # the launcher may still upload its last lines and its end
            return Status(State.STOPPING, None, "" if seen.cancelled else "the lease is closed", started_at, url=url)
        if seen.cancelled:
            return _final(seen, State.CANCELLED, EXIT_RESUMABLE, "cancelled")
        return _final(seen, *_closed(seen))
    age_s = seen.now - float(seen.lease["leased_at"])
    if age_s > float(seen.lease["deadline_s"]):
        reason = f"the lease was open for {format_duration(age_s)} without an end: it is closed"
        return _final(seen, State.TIMED_OUT, None, reason)
    lease = seen.chain_lease or {}
    services = lease.get("status")
    if services is None:
        last = unix_time(seen.record["updated_at"]) if seen.record.get("updated_at") else 0.0
        silent_s = seen.now - max(last, float(seen.lease["leased_at"]))
        name = seen.lease["provider_name"]
        if silent_s > lost_after_s:
            reason = f"the provider {name} does not answer, and the job is silent for {format_duration(silent_s)}"
            return _final(seen, State.LOST, None, reason)
        reason = f"the provider {name} does not answer"
        return Status(_state(seen), None, reason, started_at, url=url)
    return Status(_state(seen), None, _reason(seen, lease), started_at, url=url)


def _reported_end(seen: Seen) -> tuple[State, int | None, str] | None:
    """Return how the launcher or a container reported the end, None where none did."""
    record = seen.record
    if record.get("final"):
        state = State[str(record["state"])]
        code, reason = record.get("exit_code"), str(record.get("reason") or "")
        if state in (State.PREEMPTED, State.LOST) and seen.cancelled:
            return State.CANCELLED, EXIT_RESUMABLE, "cancelled"
        if state is State.PREEMPTED and not seen.open:
            reason = _closed(seen)[2]
        return state, code, reason
    for node, report in sorted(seen.reports.items()):
        reason = f"node {node}: {report.get('reason') or ''}".rstrip(": ")
        if seen.cancelled:
            break
        if report.get("kind") == "refused":
            return State.FAILED, int(report.get("code") or 78), reason
        if report.get("kind") == "restarted":
            return State.LOST, None, reason
    first = seen.reports.get(0)
    if first is None or first.get("code") is None:
        return None
    if seen.cancelled:
        return State.CANCELLED, EXIT_RESUMABLE, "cancelled"
    return _by_code(int(first["code"]), str(first.get("tail") or ""))


def _by_code(code: int, tail: str) -> tuple[State, int | None, str]:
    """Return the end of a launcher that could write nothing to the output, by its exit code and last line."""
    lines = [line.split(" ", 3)[-1] for line in tail.strip().split("\n") if "::cloudtrain::" not in line]
    reason = f"the output was not written: {lines[-1][:300] if lines else ''}".rstrip(": ")
    if code == 0:
        return State.SUCCEEDED, 0, ""
    if code == LOST_CODE:
        return State.LOST, None, reason
    return (State.PREEMPTED if code == EXIT_RESUMABLE else State.FAILED), code, reason


def _closed(seen: Seen) -> tuple[State, int | None, str]:
    """Return the end of an attempt whose lease somebody else has closed."""
    if seen.deployment is None:
        return State.LOST, None, f"Akash knows no deployment {seen.lease['dseq']}"
    lease = seen.chain_lease or {}
    name = seen.lease["provider_name"]
    why = f" ({lease['reason']})" if lease.get("reason") else ""
    if lease.get("state") == "insufficient_funds" or "insufficient_funds" in str(lease.get("reason")):
        return State.FAILED, None, "the account's funds are used up, so that the lease was closed"
    if lease.get("reclamation", {}).get("deadline") not in (None, "0", 0):
        return State.PREEMPTED, EXIT_RESUMABLE, f"the provider {name} took its capacity back{why}"
    return State.PREEMPTED, EXIT_RESUMABLE, f"the lease with {name} was closed{why}"


def _state(seen: Seen) -> State:
    state = State[str(seen.record["state"])] if seen.record.get("state") in State.__members__ else State.STARTING
    return State.STARTING if state is State.QUEUED else state


def _reason(seen: Seen, lease: Mapping[str, Any]) -> str:
    if lease.get("state") == "reclaiming":
        deadline = (lease.get("reclamation") or {}).get("deadline")
        when = f" at {format_time(float(deadline))[:19]}Z" if deadline else ""
        return f"the provider {seen.lease['provider_name']} takes its capacity back{when}"
    if seen.record.get("state") not in (None, "STARTING"):
        return ""
    usd = seen.lease.get("usd_per_hour")
    price = f" at {usd:.4g} USD an hour" if usd is not None else ""
    offers = f"; bids: {bids.table(seen.lease['bids'])}" if seen.lease.get("bids") else ""
    return f"lease with {seen.lease['provider_name']}{price}{offers}"[:300]


def _final(seen: Seen, state: State, code: int | None, reason: str) -> Status:
    end_s = seen.ending_at if seen.ending_at is not None else seen.now
    ended_at = seen.record.get("ended_at") or format_time(end_s)
    billed_s = max(0, round(seen.now - float(seen.lease["leased_at"]))) * int(seen.lease["nodes"])
    url = CONSOLE.format(dseq=seen.lease["dseq"])
    return Status(state, code, reason, seen.record.get("started_at"), ended_at, url, billed_s)
