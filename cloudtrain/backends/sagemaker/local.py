"""The backend `sagemaker-local`: SageMaker's local mode, the same training job in Docker containers on this machine.

The handle is the attempt's folder. A detached process (local_job.py) starts and supervises the containers. All methods
read the files that this process writes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.backends.api import FETCHABLE, Backend, Paths, Plan, Shell, TimeLimit, Traits
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.sagemaker import docker, local_job, local_request, local_s3
from cloudtrain.backends.sagemaker.request import OBJECT
from cloudtrain.backends.store.s3 import S3
from cloudtrain.backends.traits import HERE_FIXES
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, Problem
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import agent, directory, files, supervisor
from cloudtrain.nodes import logs as node_logs
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


class SagemakerLocalBackend(Backend):
    """Runs training jobs as containers of this machine."""

    name = "sagemaker-local"
    traits = Traits(
        Paths.HERE,
        local_request.KEYS,
        own_machines=True,
        packs=True,
        script_variables="sm_env",
        fixes=HERE_FIXES,
        shell=True,
    )
    poll_s = 0.1

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options, self.workdir = dict(options), workdir
        self.aws = Aws(self.name, options.get("region"), options.get("profile"), options.get("endpoint"), clock)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.sagemaker.options import SagemakerLocalOptions

        return SagemakerLocalOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle)
        built = local_request.build_request(job, run_id, attempt, bundle.sha256, self._options, self.workdir, about)
        return built.plan(self.name, self._options, job, bundle, "client")

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        folder = self.workdir / plan.run_id / f"a{plan.attempt}"
        if not (folder / "started").exists():
            image = str(plan.request["AlgorithmSpecification"]["TrainingImage"])
            if why := docker.why_unavailable(image):
                raise BackendError(why, _image_hint(image))
        if local_s3.uses_s3(plan.request):
            self.aws.session  # noqa: B018 - no boto3, no such profile: raised here rather than in the detached process
        try:
            # the working folder of the detached process; it stays empty
            (folder / "source").mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._upload(plan, bundle):
                # Its own copy: the stored bundle may be removed.
                files.write(folder / "code" / OBJECT, bundle.path.read_bytes())
            if local_s3.uses_s3(plan.request):
                s3_options = {name: self._options.get(name) for name in ("region", "profile", "endpoint")}
                files.write(folder / "store.json", json.dumps(s3_options).encode())
            files.write(folder / "request.json", json.dumps(plan.request).encode())
        except OSError as error:
            raise BackendError(f"{folder} cannot be prepared: {error.strerror}", "free some disk space") from None
        env = supervisor.clean_environment(os.environ) | {"CLOUDTRAIN_NODE_DIR": str(folder)}
        directory.start(folder, [sys.executable, "-m", "cloudtrain.backends.sagemaker.local_job", str(folder)], env, {})
        return str(folder)

    def _upload(self, plan: Plan, bundle: Bundle) -> bool:
        """Upload the bundle to S3 unless it exists there; False if the plan reads it from this machine."""
        source = plan.request["InputDataConfig"][-1]["DataSource"].get("S3DataSource")
        if source is None:
            return False
        store = S3(self.aws, source["S3Uri"])
        if not store.exists(OBJECT):
            store.add(OBJECT, bundle.path)
        return True

    def find(self, attempt_id: str) -> str | None:
        run_id, _, number = attempt_id.rpartition("-a")
        folder = self.workdir / run_id / f"a{number}"
        return str(folder) if agent.read_request(folder) and supervisor.has_begun(folder) else None

    def status(self, handle: str) -> Status:
        folder = Path(handle)
        status = directory.node_status(folder) if agent.read_request(folder) else None
        return status or Status(State.LOST, None, f"{folder} has no attempt")

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        folder = Path(handle)
        logs = [folder / name / "log" for name in local_job.hosts(agent.read_request(folder) or {})]
        return node_logs.tail(logs, after=after, follow=follow, ended=lambda: self.status(handle).state.final)

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> the image with its digest, as Docker reported it just before the containers started."""
        request, record = agent.read_request(Path(handle)), supervisor.read_status(Path(handle))
        image = images.pinned_image(str((record or {}).get("image") or ""))
        return dict.fromkeys(range(len(local_job.hosts(request))), image) if request and image else {}

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        folder, request = Path(handle), agent.read_request(Path(handle))
        names = local_job.hosts(request or {}) if request else []
        if request is None or node >= len(names):
            raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {len(names) - 1}")
        container = f"{docker.network_name(folder, str(request['TrainingJobName']))}-{names[node]}"
        streams = [*(["-i"] if stdin else []), *(["-t"] if terminal else [])]
        python = str(self._options.get("python") or "python3")
        return Shell((docker.PROGRAM, "exec", *streams, container, python, *words))

    def cancel(self, handle: str) -> None:
        folder = Path(handle)
        if not (request := agent.read_request(folder)):
            return
        status = self.status(handle)
        if not status.state.final:
            supervisor.stop(folder)
        elif status.state is State.LOST:  # the supervising process was killed: nothing else removes the containers
            supervisor.kill_leftovers(folder)
            local_job.end_containers(folder, request)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        from cloudtrain.backends import checkpoints
        from cloudtrain.source.folder_writer import copy_tree

        request = agent.read_request(Path(handle))
        if request is None:
            raise BackendError(f"{handle} has no attempt")
        run = local_request.run_folder(request)
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            if (run / name).is_dir():
                copy_tree(run / name, into / name)
        checkpoints.lift(into / "checkpoints")
        return into

    def check(self) -> list[Problem]:
        image = str(self._options.get("image") or local_request.IMAGE)
        try:
            why = docker.why_unavailable(image)
        except CloudtrainError as error:
            return [Problem(error.message, "", error.hint)]
        return [Problem(why, "options.sagemaker-local.image", _image_hint(image))] if why else []


def _image_hint(image: str) -> str:
    return "build it with images/build.sh" if image == local_request.IMAGE else f"docker pull {image}"
