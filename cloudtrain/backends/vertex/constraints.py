"""Write rules as Google's organisation policy: the regions in which a project may use resources.

https://cloud.google.com/resource-manager/docs/organization-policy/defining-locations (2026-11-25). Vertex AI has no IAM
condition for machines, images, labels or the time of a custom job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.backends.plan import Requirement


def build_constraints(rules: Sequence[Requirement], options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return file name -> document, and what Google cannot hold, one sentence each."""
    regions: set[str] | None = None
    notes = []
    for rule, _why, key, wanted in rules:
        if key == "regions" and not any(c in text for text in wanted for c in "*?["):
            regions = set(wanted) if regions is None else regions & set(wanted)
        else:
            notes.append(
                f"Google Cloud cannot enforce {key} (rule {rule} of the policy): cloudtrain alone checks it, at plan and submit"
            )
    if regions is None:
        return {}, notes
    allowed = [f"in:{region}-locations" for region in sorted(regions)]
    name = f"projects/{options.get('project')}/policies/gcp.resourceLocations"
    return {"regions.json": {"name": name, "spec": {"rules": [{"values": {"allowedValues": allowed}}]}}}, notes
