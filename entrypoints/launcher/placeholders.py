"""Replace placeholders such as {model_dir} in arguments and environment values by what they mean on this node.

{model_dir} {output_dir} {checkpoint_dir}   folders of the run on this node
{input:NAME}                                path of an input
{run_id} {attempt}                          as in the manifest
{role.NAME.host} {role.NAME.addresses}      of a role's nodes; known when all nodes are ready
{{model_dir}}                               the literal text {model_dir}

Every other text with braces stays as it is. cloudtrain/job/placeholders.py has the same pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .manifest import Manifest

_NAMES = (
    r"model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*"
    r"|role\.[a-z][a-z0-9-]*\.(?:host|addresses)"
)
PATTERN = rf"\{{\{{(?P<literal>{_NAMES})\}}\}}|\{{(?P<name>{_NAMES})\}}"


def values_of(manifest: Manifest, folders: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """Return placeholder -> value; `folders` are the run's by name, `inputs` are paths or URIs by name."""
    return {
        "model_dir": folders["model"],
        "output_dir": manifest.outputs(folders["outputs"]),
        "checkpoint_dir": folders["checkpoints"],
        "run_id": manifest.run_id,
        "attempt": str(manifest.attempt),
        **{f"input:{name}": path for name, path in inputs.items()},
    }


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced; one of an input that the job does not have stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"{{{match['literal']}}}"
        return values.get(match["name"], match[0])

    return re.sub(PATTERN, value, text)
