"""The reference backend of the mutants: the plugin of tests/plugin, with secrets and with statuses of many attempts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloudtrain_attic import AtticBackend

from cloudtrain.backends.api import Plan, Shell, Traits
from cloudtrain.backends.manifest import env_secrets
from cloudtrain.backends.traits import HONOURED
from cloudtrain.errors import BackendError
from cloudtrain.events import Status
from cloudtrain.nodes import directory
from cloudtrain.source.bundle import Bundle


class Reference(AtticBackend):
    """Runs one node as real processes of this machine; the mutants inherit from it."""

    traits = Traits(keys={"secrets.env": HONOURED}, shell=True)
    group, calls_per_s = "attic", 10.0

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        node = Path(plan.request["folder"])
        if not (node / "source").exists():
            bundle.extract(node / "source")
        given = {"secrets": env_secrets(plan), "token": "none"}
        self.launch(node, list(plan.request["argv"]), {**plan.request["env"], "CLOUDTRAIN_STDIN": "1"}, given)
        return str(node)

    def launch(self, node: Path, argv: list[str], env: dict[str, str], given: dict[str, Any]) -> None:
        """Start the node's launcher, once; `given` goes to its standard input."""
        directory.start(node, argv, env, given)

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        if node:
            raise BackendError(f"there is no node {node}: the attempt has 1")
        return Shell((sys.executable, *words))

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        return {handle: self.status(handle) for handle in handles}
