"""The longest time of a custom job, by the limits in its request."""

from __future__ import annotations

from cloudtrain.backends.api import Plan, TimeLimit

STOP_S = 30  # between SIGTERM and SIGKILL at the timeout: the default of Kubernetes, Vertex AI documents none


def time_limit(plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt, or why there is none."""
    scheduling = plan.request["customJob"]["jobSpec"]["scheduling"]
    timeout = scheduling.get("timeout")
    if not timeout or not scheduling.get("disableRetries"):
        return TimeLimit(None, "Vertex AI restarts a job, and does not document whether that resets its timeout")
    seconds = int(timeout.removesuffix("s")) + STOP_S
    return TimeLimit(seconds, "the price of boot disks and the fee for spot machines are not included")
