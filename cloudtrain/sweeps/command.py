"""W&B's `program` and `command` of a sweep file as the keys of a job.

The macros are those of https://docs.wandb.ai/models/sweeps/sweep-config-keys (2026-11-23). A command that starts processes
itself (torchrun, accelerate launch) is refused: a job file says how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudtrain.job.model import IN_ORDER

STYLES = {"${args}": "argparse", "${args_no_boolean_flags}": "argparse", "${args_no_hyphens}": "hydra"}
_REFUSED = {
    "${args_json}": "the script must read the file in WANDB_SWEEP_PARAM_PATH",
    "${args_json_file}": "the script must read the file in WANDB_SWEEP_PARAM_PATH",
}
_INTERPRETERS = ("${env}", "${interpreter}", "python", "python3", "/usr/bin/env")


def job_of(program: Any, command: Any) -> tuple[dict[str, Any], str]:
    """Return the keys of the job for a program and a command, and how the script gets its parameters (`file.GIVEN`).

    Raises ValueError with what cannot be taken over.
    """
    if command is None:
        command = ["${env}", "${interpreter}", "${program}", "${args}"]
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ValueError("must be a list of words")
    for word in command:
        if word in _REFUSED:
            raise ValueError(f"{word} is not supported: {_REFUSED[word]}")
        if word.startswith("${envvar:"):
            raise ValueError(f"{word} is not supported: set the variable in env of a job file")
        if word.startswith("${") and word not in (*STYLES, "${env}", "${interpreter}", "${program}"):
            raise ValueError(f"unknown macro {word}")
    words = [str(program) if word == "${program}" else word for word in command]
    if "${program}" in command and not program:
        raise ValueError("${program} needs the key program")
    while words and words[0] in _INTERPRETERS:
        words = words[1:]
    macros = [word for word in words if word in STYLES]
    if len(macros) > 1:
        raise ValueError(f"{' and '.join(macros)} cannot be combined")
    entrypoint, rest = _entrypoint(words)
    keys: dict[str, Any] = {"entrypoint": entrypoint}
    if macros:
        keys["arg_style"] = STYLES[macros[0]]
    fixed = [IN_ORDER if word in STYLES else word for word in rest]
    if fixed[:1] == [IN_ORDER]:  # hyperparameters come before other words anyway
        fixed = fixed[1:]
    if fixed:
        keys["args"] = fixed
    return keys, "python" if macros == ["${args}"] else "arguments" if macros else "file"


def _entrypoint(words: Sequence[str]) -> tuple[str, list[str]]:
    if words[:1] == ["-m"] and len(words) > 1:
        return f"-m {words[1]}", list(words[2:])
    if words and words[0].endswith(".py"):
        return words[0], list(words[1:])
    first = words[0] if words else "nothing"
    raise ValueError(f"it starts {first}: write a job file with processes_per_node and num_nodes, and set job: to it")
