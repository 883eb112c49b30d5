"""Experiment trackers (wandb, tensorboard and others) through Accelerate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .errors import Unsupported

if TYPE_CHECKING:
    from cloudtrain_runtime import RunContext

    from .arguments import Arguments


def choose(names: Sequence[str]) -> list[str]:
    """Return the trackers to report to.

    Raises Unsupported for one that is not installed, which Accelerate passes over, and for W&B without a login.
    """
    wanted = [name for name in names if name != "none"]
    for name in wanted:
        if name != "all" and find_spec(name) is None:
            raise Unsupported(f"--report_to {name}: the package {name} is not installed (pip install {name})")
    if "wandb" in wanted and not _may_log_in_to_wandb():
        raise Unsupported(
            "--report_to wandb: there is no key of W&B: add WANDB_API_KEY to secrets, or env: {WANDB_MODE: offline}"
        )
    return wanted


def _may_log_in_to_wandb() -> bool:
    """Return whether there is a login, or none is needed (https://docs.wandb.ai/guides/track/environment-variables)."""
    files = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc", os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or ""]
    return (
        bool(os.environ.get("WANDB_API_KEY"))
        or os.environ.get("WANDB_MODE", "online") not in ("", "online")
        or any(os.path.exists(os.path.expanduser(file)) for file in files if file)
    )


def begin(accelerator: Any, arguments: Arguments, context: RunContext) -> bool:
    """Begin to report, under the run's name, and return whether there is any tracker; a resumed attempt continues the
    same place."""
    if not accelerator.log_with:
        return False
    values = {item.name: getattr(arguments, item.name) for item in fields(arguments)}
    config = {name: " ".join(value) if isinstance(value, list) else value for name, value in values.items()}
    name = arguments.run_name or context.run_id
    wandb: dict[str, Any] = {"name": name, "id": context.run_id, "resume": "allow", "dir": context.output_dir}
    given = {"entity": arguments.wandb_entity, "group": arguments.wandb_group, "tags": arguments.wandb_tags}
    wandb |= {key: value for key, value in given.items() if value}  # else W&B reads its environment
    project = arguments.wandb_project or os.environ.get("WANDB_PROJECT") or "cloudtrain"
    accelerator.init_trackers(project, config=config, init_kwargs={"wandb": wandb})
    return True


def finish(accelerator: Any) -> None:
    """Let the trackers write what they have, and wait for the other ranks."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()
