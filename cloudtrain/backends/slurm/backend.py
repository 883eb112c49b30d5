"""Training on a Slurm cluster: one batch job an attempt, sent from its login node, here or over SSH.

The handle is the attempt's folder on the cluster's shared file system. What the job did stands there in files; Slurm is
asked only for what the files cannot say.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm import client, request, status
from cloudtrain.backends.slurm.client import Reading
from cloudtrain.errors import BackendError, BadJob, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import logs, paths, rpc, transfer
from cloudtrain.nodes.rpc import Agent, LocalAgent, RemoteAgent
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

LATE_S = (0.05, 0.5, 2.0)  # pauses until the last words of a job that has ended are there
FOLLOW_S = 0.2  # how often a followed log is looked at
_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? \S+: \S+")  # "node-2: task 0: Exited with exit code 127"


class SlurmBackend:
    """Runs jobs on a Slurm cluster."""

    name = "slurm"
    poll_s = 5.0  # slurmctld serves everybody
    features = frozenset(
        {
            Feature.MULTI_NODE,
            Feature.MIN_NODES,
            Feature.SPOT,
            Feature.FILE_SECRETS,
            Feature.LOCAL_PATHS,
            Feature.OBJECT_STORES,
        }
    )

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self.given = dict(options)
        self.folder = str(options.get("folder") or "")

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.slurm.options import SlurmOptions

        return SlurmOptions

    # -- the plan -----------------------------------------------------------------------------------------------------

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle) if job.output else None
        manifest = Manifest.of(job, run_id, attempt, about)
        problems = _problems(job, self.given)
        if problems:
            raise BadJob(problems)
        run_dir = f"{self.folder}/runs/{run_id}"
        folder = f"{run_dir}/a{attempt}"
        env = {f"CLOUDTRAIN_MANIFEST_{n}": piece for n, piece in enumerate(manifest.encode())}
        output, _ = paths.output_path(job.output)
        if output:
            run_dir = f"{output.rstrip('/')}/{run_id}"
        env |= {
            "CLOUDTRAIN_ATTEMPT_ID": manifest.attempt_id,
            "CLOUDTRAIN_RUN_DIR": run_dir,
            "CLOUDTRAIN_RUN_DIR_SHARED": "1",
            "CLOUDTRAIN_STDIN": "1",
        }
        again = [event for event in ("preempted", "lost") if event in job.retry.on_events]
        restarts = max(0, job.retry.max_attempts - attempt) if again else 0
        memory = job.resources.memory_bytes
        needs = {
            "cpus": job.resources.cpus,
            "memory_mb": -(-memory >> 20) if memory else None,
            "spot": job.resources.use_spot,
            "requeue": restarts > 0,
        }
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request={
                "login": (self.given.get("login") or {}).get("address"),
                "folder": folder,
                "run_dir": run_dir,
                "nodes": manifest.nodes,
                "sbatch": request.arguments(manifest.attempt_id, run_id, folder, manifest, needs, self.given),
                "script": request.script(manifest.attempt_id, folder, env, manifest, restarts, again, self.given),
            },
            bundle=bundle.to_dict(),
            manifest=manifest.to_dict(),
            job=job.to_dict(),
            notes=tuple(self._notes(manifest, restarts)),
        )

    def _notes(self, manifest: Manifest, restarts: int) -> Iterator[str]:
        yield f"{self.folder} must be on a file system that the login node and all nodes share"
        yield f"Slurm's time limit is max_runtime and {request.MARGIN_S // 60} minutes; the partition must allow that"
        if restarts:
            times = "once" if restarts == 1 else f"up to {restarts} times"
            yield f"a preempted job is requeued, {times}, and goes on from its newest checkpoint within this attempt"
        else:
            yield "a preempted job is not requeued (retry.max_attempts, or resources.use_spot)"
        if not manifest.gpus_per_node:
            yield "no accelerators are asked for: the ranks see no GPU (resources.accelerators)"

    # -- its life -----------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        if handle := self.find(plan.attempt_id):
            return handle
        folder, root = str(plan.request["folder"]), self.folder
        self._ship(bundle, root)
        self._agent.ask("extract", root=root, sha256=bundle.sha256, into=f"{folder}/source")
        script = str(plan.request["script"]).encode()
        self._agent.ask("write", given=script, path=f"{folder}/job.sh", mode=0o700)
        self._agent.ask("write", given=str(plan.request["nodes"]).encode(), path=f"{folder}/nodes")
        self._agent.ask("write", given=str(plan.request["run_dir"]).encode(), path=f"{folder}/run_dir")
        labels = json.dumps(dict(plan.job["labels"])).encode()
        self._agent.ask("write", given=labels, path=f"{folder}/labels.json")
        said = self._run(list(plan.request["sbatch"]))
        if said["code"] != 0:
            raise client.refusal(said)
        number = said["out"].strip().partition(";")[0]
        if not number.isdigit():
            raise Unreachable(f"sbatch printed no job number, but {number[:200]!r}", "squeue --me lists your jobs")
        try:
            self._agent.ask("write", given=number.encode(), path=f"{folder}/job")
        except BackendError as error:  # `find` gets the number from Slurm
            raise Unreachable(
                f"Slurm has the job {number}, which cannot be noted: {error.message}", error.hint
            ) from None
        return folder

    def _ship(self, bundle: Bundle, root: str) -> None:
        """Bring the bundle to the shared file system, once for its digest."""
        if self._agent.ask("read", path=f"{root}/src/{bundle.sha256}.tar.gz", limit=1).data:
            return
        transfer.send_bundle(self._agent, root, bundle)

    def find(self, attempt_id: str) -> str | None:
        run_id, _, number = attempt_id.rpartition("-a")
        folder = f"{self.folder}/runs/{run_id}/a{number}"
        if self._agent.ask("read", path=f"{folder}/job").data:
            return folder
        if not self._agent.ask("read", path=f"{folder}/job.sh", limit=1).data:
            return None
        found = client.find(self._run, attempt_id)  # whoever sent it died before it had written the number down
        number = found.job if found else self._owner(folder)
        if not number:
            return None
        self._agent.ask("write", given=number.encode(), path=f"{folder}/job")
        return folder

    def _owner(self, folder: str) -> str:
        """Return the number of the job that has run in a folder, "" where none has: Slurm forgets jobs (MinJobAge)."""
        said = self._run(["readlink", f"{folder}/owner"])
        return str(said["out"]).strip() if said["code"] == 0 else ""

    def discard(self, attempt_id: str) -> None:
        run_id, _, number = attempt_id.rpartition("-a")
        folder = f"{self.folder}/runs/{run_id}/a{number}"
        if self._agent.ask("read", path=f"{folder}/job.sh", limit=1).data:
            self._agent.ask("write", path=f"{folder}/stop", given=b"")  # an sbatch on its way must not run

    def labels(self, handle: str) -> dict[str, str]:
        text = self._agent.ask("read", path=f"{handle}/labels.json").data
        return dict(json.loads(text)) if text else {}

    def status(self, handle: str) -> Status:
        reading: Reading | None = None
        for pause_s in (0.0, *LATE_S):
            time.sleep(pause_s)
            files = self._files(handle)
            if "job" not in files:
                return Status(State.LOST, None, f"{handle} is gone")
            merged = status.merge_nodes(files)
            if merged is not None and merged.state.final and merged.state is not State.PREEMPTED:
                return merged
            reading = reading or client.read(self._run, files["job"].strip())
            if reading is not None and not reading.ended:
                break
            # It is over: what was read before Slurm was asked may be older than that. A job that ended by itself has had
            # its say, which a shared file system may show a little late.
            said = status.Word.of(files).name == "ENDED" or (merged is not None and merged.state.final)
            itself = reading is not None and reading.state in ("COMPLETED", "FAILED")
            if pause_s and (said or not itself):
                break
        return status.judge(files, reading, merged, lambda: self._last_words(handle))

    def _files(self, handle: str) -> dict[str, str]:
        found: dict[str, str] = self._agent.ask("texts", folder=handle, patterns=status.FILES).value
        return found

    def _last_words(self, handle: str) -> str:
        """Return the last line that Slurm or a setup line printed; srun's word that a task has ended is none."""
        texts = self._agent.ask("texts", folder=handle, patterns=["slurm.out"], limit=4000).value
        lines = [line for line in str(texts.get("slurm.out", "")).splitlines() if line.strip()]
        telling = [line for line in lines if not _TASK_ENDED.match(line)]
        return (telling or lines or [""])[-1]

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        count = int(self._agent.ask("read", path=f"{handle}/nodes").data or 0)
        paths = [f"{handle}/node-{rank}/log" for rank in range(count)]

        def ended() -> bool:
            return self.status(handle).state.final

        if isinstance(self._agent, LocalAgent):
            return logs.tail([Path(path) for path in paths], after=after, follow=follow, ended=ended)

        look = rpc.remote_log_reader([(self._agent, path) for path in paths], set())
        return logs.merge(look, count, after=after, follow=follow, ended=ended, pause_s=FOLLOW_S)

    def cancel(self, handle: str) -> None:
        files = self._files(handle)
        if "job" not in files:
            return
        job = files["job"].strip()
        if self.status(handle).state.final:
            reading = client.read(self._run, job)
            if reading is None or reading.ended:
                return
            self._agent.ask("write", path=f"{handle}/stop", given=b"")  # what Slurm starts again must not run
        else:
            self._agent.ask("write", path=f"{handle}/cancel", given=b"")
            for rank in range(int(self._agent.ask("read", path=f"{handle}/nodes").data or 0)):
                self._agent.ask("write", path=f"{handle}/node-{rank}/cancel", given=b"")
        said = self._run(["scancel", job])
        if said["code"] != 0 and "Invalid job id" not in said["err"]:
            raise client.refusal(said, "Slurm does not cancel the job")

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        run_dir = self._agent.ask("read", path=f"{handle}/run_dir").data.decode()
        into.mkdir(parents=True, exist_ok=True)
        for name in what if run_dir else ():
            place = f"{run_dir}/{name}"
            transfer.download_folder(self._agent, place, into / name)
        return into

    # -- the cluster --------------------------------------------------------------------------------------------------

    @cached_property
    def _agent(self) -> Agent:
        """Where Slurm's commands and the shared folder are: this machine, or the login node."""
        login = self.given.get("login")
        if not login:
            return LocalAgent()
        from cloudtrain.nodes.ssh import Host

        return RemoteAgent(Host(**login), str(self.given.get("python") or "python3"), request.environment(self.given))

    @cached_property
    def _run(self) -> Callable[[Sequence[str]], Mapping[str, Any]]:
        def run(argv: Sequence[str]) -> Mapping[str, Any]:
            said: Mapping[str, Any] = self._agent.ask("command", argv=list(argv), hide=client.HIDE).value
            return said

        return run

    def check(self) -> list[Problem]:
        if not self.folder:
            return [Problem("no folder is named", "options.slurm.folder", "a folder that all nodes share")]
        try:
            facts = self._agent.ask("facts", root=self.folder).value
            version = self._run(["sbatch", "--version"])
        except BackendError as error:
            return [Problem(error.message, "options.slurm.login", error.hint)]
        problems = []
        if not facts["writable"]:
            problems.append(Problem(f"{self.folder} cannot be written", "options.slurm.folder"))
        elif facts["free_bytes"] < 1 << 30:
            problems.append(Problem(f"less than 1 GiB is free below {self.folder}", "options.slurm.folder"))
        if version["code"] != 0:
            hint = "name the login node: options.slurm.login"
            return [*problems, Problem(f"sbatch cannot be run: {version['err'].strip()}", "options.slurm", hint)]
        return [*problems, *self._probe(problems)]

    def _probe(self, found: Sequence[Problem]) -> Iterator[Problem]:
        """Ask Slurm whether it would take a job, and a node, where one is free at once, whether it sees the folder."""
        manifest = Manifest("doctor", 1, ("true",), 1, 1, max_runtime_s=60, grace_s=1)
        argv = request.arguments("cloudtrain-doctor", "doctor", self.folder, manifest, {}, self.given)
        allowed = [word for word in argv[2:-1] if not word.startswith(("--output", "--open-mode", "--chdir"))]
        taken = self._run(["sbatch", "--test-only", *allowed, "--wrap=true"])
        if taken["code"] != 0:
            yield Problem(client.refusal(taken).message, "options.slurm", "sinfo and sacctmgr show what there is")
            return
        if found:
            return
        probe = f"{self.folder}/.cloudtrain-doctor"
        self._agent.ask("write", path=probe, given=b"seen")
        where = [word for word in allowed if not word.startswith(("--parsable", "--export", "--no-requeue", "--time"))]
        seen = self._run(["srun", "--immediate=5", "--quiet", "--time=1", "--mpi=none", *where, "cat", probe])
        busy = "Unable to allocate" in seen["err"] or seen["code"] is None
        if seen["out"].strip() != "seen" and not busy:
            words = seen["err"].strip().splitlines()
            yield Problem(
                f"a node does not see {self.folder}" + (f": {words[-1]}" if words else ""),
                "options.slurm.folder",
                "name a folder on the cluster's shared file system",
            )

    @classmethod
    def discover(cls) -> dict[str, Any]:
        if not shutil.which("sinfo"):
            return {}
        try:
            run = partial(LocalAgent().ask, "command", hide=client.HIDE, limit_s=10.0)
            names = run(argv=["sinfo", "--noheader", "--format=%P"]).value["out"].split()
            user = run(
                argv=["sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc", "format=DefaultAccount"]
            )
        except BackendError:
            return {}
        found: dict[str, Any] = {"folder": str(Path.home() / "cloudtrain")}
        default = [name.rstrip("*") for name in names if name.endswith("*")] or names[:1]
        if default:
            found["partition"] = default[0]
        accounts = [line for line in user.value["out"].split() if line]
        return {**found, "account": accounts[0]} if len(set(accounts)) == 1 else found


# -- what a job cannot have here ------------------------------------------------------------------------------------------


def _problems(job: Job, options: Mapping[str, Any]) -> list[Problem]:
    problems = []
    if not options.get("folder"):
        hint = "a folder on the cluster's shared file system, in cloudtrain.toml"
        problems.append(Problem("is not given", "options.slurm.folder", hint))
    if job.resources.use_spot and not (options.get("spot_partition") or options.get("spot_qos")):
        hint = "name the partition whose jobs may be preempted: options.slurm.spot_partition, or spot_qos"
        problems.append(Problem("means nothing to this cluster", "resources.use_spot", hint))
    return problems + paths.output_path(job.output)[1] + paths.check_inputs(job)
