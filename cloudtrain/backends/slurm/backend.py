"""The Slurm backend: runs each attempt as one batch job, submitted from the login node (this machine or over SSH).

The handle is the attempt's folder on the cluster's shared file system. The job writes its status to files there; Slurm's
commands are called only for what the files do not contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Facts, Paths, Plan, Shell, TimeLimit, Traits
from cloudtrain.backends.folder import FOLLOW_S, PLAN, FolderBackend
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm import arrays, client, partitions, request, script, status, submission
from cloudtrain.backends.slurm.client import QueueEntry
from cloudtrain.backends.slurm.slices import Slices
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, NoService, NotReached, Problem, Unreachable
from cloudtrain.events import PLATFORM, LogLine, State, Status
from cloudtrain.nodes import rpc, transfer
from cloudtrain.nodes.agents import Agent, LocalAgent, Node
from cloudtrain.nodes.files import modified_at
from cloudtrain.nodes.rpc import RemoteAgent
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

CANCEL_S = 120  # beside limits.grace, until Slurm ends a cancelled job: NFS may show the mark a minute late
LATE_S = (0.05, 0.5, 2.0)  # pauses while waiting for the last files of an ended job
_NUMBERED = re.compile(r"^\d+ -1 \S+ ")  # of a line of the batch script, as script.py writes it
_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? \S+: \S+")  # "node-2: task 0: Exited with exit code 127"


class SlurmBackend(FolderBackend):
    """Runs jobs on a Slurm cluster."""

    name = "slurm"
    traits = Traits(
        Paths.NODES,
        request.KEYS,
        own_machines=True,
        shared_files=True,
        client="asyncssh",
        shell=True,
        fixes=request.FIXES,
    )
    poll_s = 5.0  # slurmctld serves everybody

    # A site that limits its users' calls refills 2 a second by default, after a burst of 30 (rl_refill_rate and
    # rl_bucket_size of SlurmctldParameters, https://slurm.schedmd.com/slurm.conf.html, 2026-11-23). Half of that.
    calls_per_s = 1.0
    variables = ("SLURM_CONF", "SLURM_CLUSTERS", "SSH_AUTH_SOCK", "HOME", "PATH")  # PATH: of sbatch
    stops_nodes = False
    logs_per_s = 20.0  # files of the shared folder: Slurm is not asked

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.site_options, self.workdir = dict(options), workdir
        place = {name: options.get(name) for name in ("login", "python", "modules", "conda", "setup")}
        self.group = f"slurm {json.dumps(place, sort_keys=True, default=str)}"
        self.folder = str(options.get("folder") or "")
        self.runs = f"{self.folder}/runs"
        self.follow_s = FOLLOW_S if options.get("login") else 0.0
        self.has_marks = not options.get("login")
        self._expected: tuple[Sequence[Plan], int] = (), 0  # attempts for one array, and how many run at a time

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.slurm.options import SlurmOptions

        return SlurmOptions

    @classmethod
    def output_is_here(cls, options: Mapping[str, Any]) -> bool:
        return not options.get("login")  # this is a login node

    # -- the plan -----------------------------------------------------------------------------------------------------

    @classmethod
    def convert(cls, path: Path, backend: str) -> tuple[dict[str, Any], list[str]] | None:
        """Return the job of a batch script; on another backend its body is one command, or it is refused."""
        from cloudtrain.backends.slurm import sbatch
        from cloudtrain.job import job as jobs

        if not sbatch.is_job_file(path.read_text("utf-8", "replace")):
            return None
        document, _ = jobs.read(path)
        sbatch.fit_backend(document, backend or cls.name)
        if document.problems:
            raise BadJob(document.problems)
        job = dict(document.value)
        notes = sbatch.notes(job.get("run") or "")
        if "run" in job:
            job["run"] = re.sub(r"(?m)^#(SBATCH.*)?\n", "", job["run"])
        return job, notes

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle) if job.output else None
        manifest = Manifest.of(job, run_id, attempt, about)
        problems = request.check_job(job, self.site_options)
        if problems:
            raise BadJob(problems)
        restarts, events = request.allowed_restarts(job, attempt)
        limits = self._limits(job.resources.use_spot)
        slices = Slices.of(manifest, self.site_options.get("slice"), limits)
        built = request.build_request(job, manifest, run_id, attempt, self.site_options, restarts, events, slices)
        notes = (
            *request.plan_notes(manifest, restarts, slices, len(request.components(job))),
            *request.gpu_notes(job, self.site_options),
            *partitions.notes(limits, built["sbatch"], request.MARGIN_S),
        )
        return Plan.of(self.name, job, bundle, manifest.to_dict(), built, notes)

    def avoid(self, plan: Plan, names: Sequence[str]) -> Plan:
        argv = list(plan.request["sbatch"])
        given = [text.partition("=")[2] for text in argv if text.startswith("--exclude=")]
        argv = [text for text in argv if not text.startswith("--exclude=")]
        known = [name for name in names if re.fullmatch(r"[\w.-]+", name)]  # of other forms Slurm makes lists
        if not known:
            return plan
        at = argv.index(":") if ":" in argv else -1  # all components of a job exclude what the first one does
        argv.insert(at, f"--exclude={','.join(dict.fromkeys([*given, *known]))}")
        return replace(plan, request={**plan.request, "sbatch": argv})

    # -- its life -----------------------------------------------------------------------------------------------------

    def time_limit(self, plan: Plan) -> TimeLimit:
        return request.time_limit(plan)

    def preflight(self, plan: Plan) -> None:
        if self.site_options.get("login"):
            from cloudtrain.nodes.ssh import check_installed

            check_installed()

    def most_together(self, plan: Plan) -> int:
        return arrays.MOST if arrays.may_hold(plan) else 1

    def expect(self, plans: Sequence[Plan], at_once: int) -> None:
        self._expected = plans, at_once

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        try:
            handle = self.find(plan.attempt_id)
        except NoService as error:  # nothing was sent
            raise NotReached(f"the login node cannot be reached: {error.message}", error.hint, waits=False) from None
        if handle:
            return handle
        (plans, at_once), self._expected = self._expected, ((), 0)
        sending = submission.Submission(self._agent, self._run, self.folder, bundle)
        if plan in plans[:-1]:
            plans = [each for each in plans if each == plan or not self.find(each.attempt_id)]
            if sending.submit_array(plan, plans, at_once):
                return str(plan.request["folder"])
        sending.submit(plan)
        return str(plan.request["folder"])

    def find(self, attempt_id: str) -> str | None:
        folder = self.attempt_folder(attempt_id)
        if self._agent.ask("read", path=f"{folder}/job").data:
            return folder
        if not self._agent.ask("read", path=f"{folder}/job.sh", limit=1).data:
            return None
        # Whoever sent it died before it had written the number down.
        name, _, task = self._agent.ask("read", path=f"{folder}/array").data.decode().partition(" ")
        queue_entry = client.find_job(self._run, name or attempt_id)
        number = queue_entry.job if queue_entry else self._owner_job(folder)
        number = f"{number.partition('_')[0]}_{task}" if number and task else number
        if not number:
            if name:  # the attempt will be a job of its own
                self._agent.ask("write", given=b"", path=f"{folder}/array")
            return None
        self._agent.ask("write", given=number.encode(), path=f"{folder}/job")
        return folder

    def _owner_job(self, folder: str) -> str:
        """Return the number of the job that ran in a folder, "" if none did. Slurm itself forgets jobs (MinJobAge)."""
        completed = self._run(["readlink", f"{folder}/owner"])
        return str(completed["out"]).strip() if completed["code"] == 0 else ""

    def discard(self, attempt_id: str) -> None:
        folder = self.attempt_folder(attempt_id)
        if self._agent.ask("read", path=f"{folder}/job.sh", limit=1).data:
            self._agent.ask("write", path=f"{folder}/stop", given=b"")  # an sbatch on its way must not run

    def nodes(self, handle: str) -> list[Node]:
        count = int(self._agent.ask("read", path=f"{handle}/nodes").data or 0)
        return [Node(self._agent, rank, handle) for rank in range(count)]

    def machines_with_runs(self) -> list[Agent]:
        return [self._agent]

    def run_folders(self, handle: str) -> dict[str, tuple[Agent, str]]:
        folder = handle.rpartition("/")[0]
        return {folder: (self._agent, folder)}

    def status(self, handle: str) -> Status:
        queue_entry: QueueEntry | None = None
        for pause_s in (0.0, *LATE_S):
            self._clock.sleep(pause_s)
            files = self._files(handle)
            if "job" not in files:
                return Status(State.LOST, None, f"the attempt's folder {handle} no longer exists")
            if ended := status.end_of(files):
                return ended
            nodes_status = status.merge_nodes(files)
            queue_entry = queue_entry or client.query_job(self._run, files["job"].strip())
            if queue_entry is not None and not queue_entry.ended:
                break
            # The job has ended, but the files were read before Slurm was asked, so read them again.
            if pause_s and status.is_settled(files, queue_entry, nodes_status):
                break
        return status.attempt_status(files, queue_entry, nodes_status, lambda: self._last_output_line(handle))

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return the statuses of attempts from one squeue; left out is what `status` has to look at more closely."""
        all_files = self._all_files(handles)
        found = {handle: ended for handle, files in all_files.items() if (ended := status.end_of(files))}
        jobs = {
            handle: files["job"].strip()
            for handle, files in all_files.items()
            if handle not in found and "job" in files
        }
        entries = client.query_jobs(self._run, list(dict.fromkeys(jobs.values())))
        queued = {handle: entries[job] for handle, job in jobs.items() if job in entries}
        all_files |= self._all_files(
            [handle for handle, entry in queued.items() if entry.ended]
        )  # they may be newer now
        for handle, entry in queued.items():
            files = all_files[handle]
            nodes_status = status.merge_nodes(files)
            if "job" in files and (not entry.ended or status.is_settled(files, entry, nodes_status)):
                last_output = partial(self._last_output_line, handle)
                found[handle] = status.attempt_status(files, entry, nodes_status, last_output)
        return found

    def marks(self, handles: Sequence[str]) -> dict[str, Any]:
        names = ("state", "node-0/status.json")  # of the batch script and of the first launcher, as status.FILES
        return {handle: [modified_at(f"{handle}/{name}") for name in names] for handle in handles}

    def ended(self, handles: Sequence[str]) -> dict[str, Status]:
        found = self._all_files(handles)
        return {handle: ended for handle, files in found.items() if (ended := status.end_of(files))}

    def _all_files(self, handles: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the files of several attempts' folders, from one request; those that cannot be read are left out."""
        arguments = [{"folder": handle, "patterns": status.FILES} for handle in handles]
        answers = rpc.read_each(self._agent, rpc.begin_each(self._agent, "texts", arguments)) if arguments else []
        pairs = zip(handles, answers, strict=True)
        return {handle: files for handle, files in pairs if not isinstance(files, BackendError)}

    def _files(self, handle: str) -> dict[str, str]:
        files: dict[str, str] = self._agent.ask("texts", folder=handle, patterns=status.FILES).value
        return files

    def _last_output_line(self, handle: str) -> str:
        """Return the last line that Slurm or a setup line printed, without srun's messages that a task has ended."""
        texts = self._agent.ask("texts", folder=handle, patterns=["slurm.out"], limit=4000).value
        lines = [_NUMBERED.sub("", line) for line in str(texts.get("slurm.out", "")).splitlines() if line.strip()]
        before, last = ["", "", *([line for line in lines if not _TASK_ENDED.match(line)] or lines)][-2:]
        return f"{last} ({before})" if before and last.startswith("this setup line failed") else last

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        files = [(node.agent, f"{node.folder}/log") for node in self.nodes(handle)]
        if not files:
            return iter(())  # the folder is gone
        lines = self.read_logs(handle, [*files, (self._agent, f"{handle}/slurm.out")], follow, after, set())
        return (line if line.node < len(files) else line._replace(node=PLATFORM) for line in lines)

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        from cloudtrain.backends.slurm.step import step_shell

        job = self._agent.ask("read", path=f"{handle}/job").data.decode().strip()
        if not job:
            raise BackendError(f"{handle} holds no job")
        places = json.loads(self._agent.ask("read", path=f"{handle}/machines").data or "[]")
        node = places[node] if 0 <= node < len(places) else node
        return step_shell(self._run, self.site_options, job, node, words, stdin=stdin, terminal=terminal)

    def cancel(self, handle: str) -> None:
        files = self._files(handle)
        if "job" not in files:
            return
        job = files["job"].strip()
        if self.status(handle).state.final:
            queue_entry = client.query_job(self._run, job)
            if queue_entry is None or queue_entry.ended:
                return
            self._agent.ask("write", path=f"{handle}/stop", given=b"")  # what Slurm starts again must not run
        elif files.get("cancel"):
            return  # a request before has set the job's end
        else:
            self._agent.ask("write", path=f"{handle}/cancel", given=b"")
            for node in self.nodes(handle):
                node.ask("write", path=f"{node.folder}/cancel", given=b"")
            if self._is_ended_by_launchers(handle, files, job):
                return
        completed = self._run(["scancel", job])
        if completed["code"] != 0 and "Invalid job id" not in completed["err"]:
            raise client.error_for_command(completed, "Slurm refuses to cancel the job")

    def _is_ended_by_launchers(self, handle: str, files: Mapping[str, str], job: str) -> bool:
        """Return whether launchers run that see the cancel mark; Slurm ends their job later, if it is still there.

        scancel signals every process at once: a script whose `tee` is gone fails while it saves.
        """
        nodes_status = status.merge_nodes(files)
        plan = self._agent.ask("read", path=f"{handle}/{PLAN}").data
        if not plan or nodes_status is None or nodes_status.state not in (State.RUNNING, State.STOPPING):
            return False
        end_s = int(json.loads(plan)["manifest"]["grace_s"]) + CANCEL_S
        completed = self._run(["scontrol", "update", f"JobId={job}", f"EndTime=now+{end_s}seconds"])
        if completed["code"] != 0:
            error = client.error_for_command(completed)
            if isinstance(error, Unreachable):
                raise error
            return False  # denied here, or the job ends earlier anyway
        self._agent.ask("write", path=f"{handle}/cancel", given=b"end set")
        return True

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        run_dir = self._agent.ask("read", path=f"{handle}/run_dir").data.decode()
        into.mkdir(parents=True, exist_ok=True)
        for name in what if run_dir else ():
            folder = f"{run_dir}/{name}"
            transfer.download_folder(self._agent, folder, into / name)
        return into

    # -- the cluster --------------------------------------------------------------------------------------------------

    @cached_property
    def _agent(self) -> Agent:
        """The agent on the machine with Slurm's commands and the shared folder: this machine, or the login node."""
        return self._new_agent("files")

    def _new_agent(self, process: str) -> Agent:
        login = self.site_options.get("login")
        if not login:
            return LocalAgent()
        from cloudtrain.nodes.ssh import Host

        return RemoteAgent(
            Host(**login),
            str(self.site_options.get("python") or "python3"),
            script.environment_lines(self.site_options),
            process,
        )

    @cached_property
    def _run(self) -> Callable[[Sequence[str]], Mapping[str, Any]]:
        agent = self._new_agent("commands")  # a squeue that hangs holds up no line of a log

        def run(argv: Sequence[str]) -> Mapping[str, Any]:
            completed: Mapping[str, Any] = agent.ask("command", argv=list(argv), hide=client.HIDDEN_VARIABLES).value
            return completed

        return run

    def facts(self, plan: Plan) -> Facts:
        return Facts(gpus=request.count_gpus(plan.request["sbatch"], int(plan.manifest["nodes"])))

    def check(self) -> list[Problem]:
        from cloudtrain.backends.slurm import doctor

        if not self.folder:
            return [
                Problem(
                    "no folder is set",
                    "options.slurm.folder",
                    "set options.slurm.folder to a folder that all nodes share",
                )
            ]
        if limits := partitions.parse(self._run(partitions.SINFO)["out"]):
            partitions.store(self.workdir, self.group, limits)
        return doctor.check_cluster(self._agent, self._run, self.site_options)

    def probe(self, plan: Plan) -> list[Problem]:
        from cloudtrain.backends.slurm import doctor

        argv = plan.request["sbatch"]
        notes = partitions.notes(self._limits(plan.job["resources"]["use_spot"]), argv, request.MARGIN_S)
        return [*doctor.try_submission(self._run, argv), *(Problem(text, "limits") for text in notes)]

    def _limits(self, spot: bool) -> partitions.Limits:
        return partitions.limits_of(self.workdir, self.group, request.partition_of(spot, self.site_options))

    @classmethod
    def discover(cls) -> dict[str, Any]:
        from cloudtrain.backends.slurm import doctor

        return doctor.discover_options()
