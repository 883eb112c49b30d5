"""Replace placeholders such as {model_dir} in arguments and environment values by what they mean on this node.

{model_dir} {output_dir} {checkpoint_dir}   folders of the run on this node
{input:NAME}                                path of an input
{run_id} {attempt}                          as in the manifest
{{model_dir}}                               the literal text {model_dir}

Every other text with braces stays as it is. cloudtrain/job/placeholders.py has the same pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .manifest import Manifest

PATTERN = (
    r"\{\{(?P<literal>model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*)\}\}"
    r"|\{(?P<name>model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*)\}"
)


def values_of(manifest: Manifest, folders: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """Return placeholder -> value; `folders` are the run's by name, `inputs` are paths or URIs by name."""
    return {
        "model_dir": folders["model"],
        "output_dir": folders["outputs"],
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
