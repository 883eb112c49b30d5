"""Write the folders of attempts on the cluster, and submit their batch jobs: each by itself, or several as one array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain.backends.folder import PLAN
from cloudtrain.backends.slurm import arrays, client
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import paths, transfer

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.nodes.agents import Agent
    from cloudtrain.source.bundle import Bundle


class Submission:
    """Submits attempts of one bundle, which it uploads to the shared file system unless it is there."""

    def __init__(self, agent: Agent, run: client.Command, folder: str, bundle: Bundle) -> None:
        self._agent, self._run, self._folder, self._bundle = agent, run, folder, bundle
        if not agent.ask("read", path=f"{folder}/src/{bundle.sha256}.tar.gz", limit=1).data:
            transfer.send_bundle(agent, folder, bundle)

    def submit(self, plan: Plan) -> None:
        """Submit one attempt; blocking. Raises BackendError, or Unreachable where it may have been accepted."""
        self._stage(plan)
        self._store_number(plan, self._sbatch(plan.request["sbatch"]))

    def submit_array(self, first: Plan, plans: Sequence[Plan], at_once: int) -> bool:
        """Submit attempts as one array, named after the first; False where the cluster refuses it, for it may limit arrays.

        Blocking. Raises BackendError, Unreachable as `submit` does.
        """
        name = f"{first.attempt_id}-and-{len(plans) - 1}"
        for task, each in enumerate(plans):
            self._stage(each, f"{name} {task}")
        folder = f"{self._folder}/arrays/{name}"
        mode = paths.folder_mode(str(first.request.get("umask", "077")))
        self._agent.ask("folders", path=folder, mode=mode)
        self._agent.ask("write", given=arrays.script(plans).encode(), path=f"{folder}/job.sh", mode=0o700)
        try:
            number = self._sbatch(arrays.command(plans, name, folder, at_once))
        except Unreachable:
            raise
        except BackendError:
            self._agent.ask("write", given=b"", path=f"{first.request['folder']}/array")
            return False
        for task, each in enumerate(plans):
            self._store_number(each, f"{number}_{task}")
        return True

    def _stage(self, plan: Plan, array: str = "") -> None:
        """Write the folder of an attempt; `array` is the name of the array that is to run it, and the number of the task."""
        folder = str(plan.request["folder"])
        mode = paths.folder_mode(str(plan.request.get("umask", "077")))
        self._agent.ask("folders", path=folder, mode=mode)
        self._agent.ask("extract", root=self._folder, sha256=self._bundle.sha256, into=f"{folder}/source", mode=mode)
        if array:
            self._agent.ask("write", given=array.encode(), path=f"{folder}/array")
        self._agent.ask("write", given=str(plan.request["script"]).encode(), path=f"{folder}/job.sh", mode=0o700)
        self._agent.ask("write", given=str(plan.request["nodes"]).encode(), path=f"{folder}/nodes")
        if places := plan.request.get("machines"):
            self._agent.ask("write", given=json.dumps(places).encode(), path=f"{folder}/machines")
        self._agent.ask("write", given=str(plan.request["run_dir"]).encode(), path=f"{folder}/run_dir")
        labels = json.dumps(dict(plan.job["labels"])).encode()
        self._agent.ask("write", given=labels, path=f"{folder}/labels.json")
        self._agent.ask("write", given=plan.to_json().encode(), path=f"{folder}/{PLAN}")

    def _sbatch(self, argv: Sequence[str]) -> str:
        """Submit a batch job and return its number."""
        completed = self._run(list(argv))
        if completed["code"] != 0:
            raise client.error_for_command(completed)
        job_number = str(completed["out"]).strip().partition(";")[0]
        if not job_number.isdigit():
            raise Unreachable(
                f"sbatch printed no job number, but {job_number[:200]!r}",
                "run squeue --me to see whether the job was submitted",
            )
        return job_number

    def _store_number(self, plan: Plan, number: str) -> None:
        try:
            self._agent.ask("write", given=number.encode(), path=f"{plan.request['folder']}/job")
        except BackendError as error:  # `find` gets the number from Slurm
            raise Unreachable(
                f"Slurm has started job {number}, but cloudtrain could not store its number: {error.message}",
                error.hint,
            ) from None
