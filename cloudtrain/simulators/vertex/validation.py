"""What Vertex AI refuses of a job besides its fields: places, counts of accelerators, filters of its list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends import machines
from cloudtrain.simulators.http import ApiError

# google-cloud-aiplatform, constants/base.py: SUPPORTED_REGIONS (2026-11-23)
REGIONS = """
africa-south1 asia-east1 asia-east2 asia-northeast1 asia-northeast2 asia-northeast3 asia-south1 asia-south2
asia-southeast1 asia-southeast2 australia-southeast1 australia-southeast2 europe-central2 europe-north1 europe-north2
europe-southwest1 europe-west1 europe-west12 europe-west2 europe-west3 europe-west4 europe-west6 europe-west8 europe-west9
me-central1 me-central2 me-west1 northamerica-northeast1 northamerica-northeast2 southamerica-east1 southamerica-west1
us-central1 us-east1 us-east4 us-east5 us-east7 us-south1 us-west1 us-west2 us-west3 us-west4 us-west8
"""
# The docstring of google.cloud.aiplatform_v1.types.ListCustomJobsRequest (2026-11-23); a label's key:* means that it exists.
# That of aiplatform.CustomJob.list adds camelCase names (google-cloud-aiplatform 2.7.0, jobs.py).
FILTERS = (
    r'display(?:_n|N)ame\s*(=|!=|:)\s*"[^"]*"',
    r'state\s*(=|!=)\s*"JOB_STATE_[A-Z_]+"',
    r'create(?:_t|T)ime\s*(=|!=|<=|>=|<|>)\s*"\d{4}-\d\d-\d\dT[^"]+Z"',
    r'labels\.[a-zA-Z][a-zA-Z0-9_-]*(="?[a-zA-Z0-9_-]+"?|:\*)',
)
_TERM = re.compile(rf"\s*(NOT\s+)?({'|'.join(FILTERS)})\s*")


def check_place(region: str) -> None:
    """Raise ApiError where there is no such region."""
    if region not in REGIONS.split():
        raise ApiError(400, f"Location {region} is not supported for this service.")


def check_accelerators(spec: Mapping[str, Any]) -> None:
    """Raise ApiError where a machine type of machines.csv does not have such accelerators, or not so many."""
    asked = (str(spec.get("acceleratorType") or ""), int(spec.get("acceleratorCount") or 0))
    offered = {
        (machine.more["accelerator_type"] or "", machine.accelerators)
        for machine in machines.load("vertex")
        if machine.name == spec["machineType"]
    }
    if asked[0].isdigit():  # the SDK sends the enum's number
        asked, offered = ("", asked[1]), {("", count) for _, count in offered}
    if offered and asked not in offered:
        message = (
            f'Accelerator "{asked[0]}" with count {asked[1]} is not supported for machine type "{spec["machineType"]}".'
        )
        raise ApiError(400, message)


def check_job_filter(text: str) -> None:
    """Raise ApiError where a filter of the list of jobs holds more than the API documents."""
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        conjunction = re.compile(r"(AND|OR)\b").match(text, match.end()) if match else None
        if match is None or (conjunction is None and match.end() < len(text)):
            raise ApiError(400, f"Invalid filter: {text[at:][:80]!r}")
        at = conjunction.end() if conjunction else match.end()
