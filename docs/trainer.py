"""The page docs/reference/trainer.md: the arguments of the shared trainer, as the code has them."""

from __future__ import annotations

from dataclasses import MISSING, fields

from cloudtrain.source import node_code

HEAD = """\
# Arguments of the shared trainer

They are `hyperparameters` of a job with `trainer: true` ([the shared trainer](../training.md)). Names and meanings are those of transformers' `TrainingArguments` where one exists. `-1` means
"not limited" where a number of steps or samples is asked for.
"""


def page(written: str) -> str:
    """Return the page; `written` is the mark of a generated part."""
    rows = [
        HEAD.rstrip(),
        "",
        written,
        "",
        "| argument | default | meaning |",
        "| --- | --- | --- |",
    ]
    for item in fields(node_code.module("trainer.arguments").Arguments):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        if isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = f"`{default}`" if default not in ("", []) else ""
        choices = item.metadata.get("choices") or ()
        meaning = item.metadata["help"].replace("|", "\\|") + (f" One of {', '.join(choices)}." if choices else "")
        rows.append(f"| `{item.name}` | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"
