"""A toy backend: the old machine in the attic. It runs one node, in a folder that the options name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Backend, Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import directory, supervisor
from cloudtrain.nodes.logs import tail
from cloudtrain.source.folder_writer import copy_tree

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


class AtticBackend(Backend):
    """Runs jobs in a folder of the attic."""

    name = "attic"
    poll_s = 0.1

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self.attic = Path(options.get("folder") or workdir)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from pydantic import BaseModel, ConfigDict

        class AtticOptions(BaseModel):
            """Options of the backend `attic`."""

            model_config = ConfigDict(extra="forbid")
            folder: str | None = None

        return AtticOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        manifest = Manifest.of(job, run_id, attempt)
        node = self.attic / run_id / f"a{attempt}"
        env = {f"CLOUDTRAIN_MANIFEST_{number}": piece for number, piece in enumerate(manifest.encode())}
        env |= {
            "CLOUDTRAIN_NODE_RANK": "0",
            "CLOUDTRAIN_NODE_DIR": str(node),
            "CLOUDTRAIN_RUN_DIR": str(self.attic / run_id),
        }
        env |= {"CLOUDTRAIN_ATTEMPT_ID": manifest.attempt_id, "CLOUDTRAIN_GPUS": "", "PATH": "/usr/bin:/bin"}
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request={"folder": str(node), "argv": [sys.executable, ".cloudtrain/launch.py"], "env": env},
            bundle=bundle.to_dict(),
            manifest=manifest.to_dict(),
            job=job.to_dict(),
        )

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        node = Path(plan.request["folder"])
        if not (node / "source").exists():
            bundle.extract(node / "source")
        directory.start(
            node, plan.request["argv"], plan.request["env"], {}
        )  # starts it once, however often it is called
        return str(node)

    def find(self, attempt_id: str) -> str | None:
        run_id, _, number = attempt_id.rpartition("-a")
        node = self.attic / run_id / f"a{number}"
        return str(node) if (node / "started").exists() else None

    def status(self, handle: str) -> Status:
        found = directory.node_status(Path(handle))
        return found or Status(State.LOST, reason="there is no such thing in the attic")

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        def ended() -> bool:
            return self.status(handle).state.final

        return tail([Path(handle) / "log"], after=after, follow=follow, ended=ended)

    def cancel(self, handle: str) -> None:
        if not self.status(handle).state.final:
            supervisor.stop(Path(handle))

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            if (Path(handle).parent / name).is_dir():
                copy_tree(Path(handle).parent / name, into / name)
        return into
