r"""Build a Slurm batch job: the arguments of sbatch and the batch script, pure data.

<folder>/src/<sha256>.tar.gz   bundles, by their digest
<folder>/runs/<run>/           checkpoints, outputs, model: the run's
<folder>/runs/<run>/a<N>/      an attempt
    job.sh, source/            the script, and the bundle, extracted once for all nodes
    job                        Slurm's job number, written by submit or by the script, whichever is first
    array                      the name of the array job that is to run it (arrays.py), and the number of the task
    begun                      when the allocation began, in seconds since 1970
    owner                      a link to the number of the job that may run; a second submission of the job exits
    state                      the script's state: STARTED, REQUEUED or ENDED, restart, exit code, details
    slices                     how many slices of max_runtime are over (slices.py), and the seconds of all starts
    cancel, stop               a user asked to cancel (not empty: when Slurm ends it is set); the client gave up the attempt
    node-<rank>/               as nodes/directory.py describes it
    slurm.out                  what setup lines and srun printed, in the form of a node's log, and lines of Slurm's own
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan, TimeLimit
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm.script import batch_script
from cloudtrain.backends.slurm.slices import Slices
from cloudtrain.backends.traits import HONOURED, NO_EFFECT
from cloudtrain.errors import Problem
from cloudtrain.job import roles, rules
from cloudtrain.nodes import paths

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

KILL_WAIT_S = (
    30  # KillWait: between SIGTERM and SIGKILL at the time limit (slurm.schedmd.com/slurm.conf.html, 2026-11-23)
)
MARGIN_S = 300  # added to max_runtime for Slurm's time limit: staging at the start, the last checkpoint at the end
# Options that the plan sets itself; `directives` (sbatch) and `srun_args` must not contain them.
SRUN_OPTIONS = ("nodes", "ntasks", "ntasks-per-node", "export", "kill-on-bad-exit", "wait", "job-name", "output", "error",
        "input", "chdir", "multi-prog", "jobid", "time", "array")  # fmt: skip
TASKS = ("ntasks", "ntasks-per-node")  # of a job whose text is a body of sbatch only
RESERVED_OPTIONS = ("job-name", "output", "error", "nodes", "array", "chdir", "export", "requeue", "no-requeue",
        "parsable", "test-only", "wrap", "wait", "open-mode", "comment", "time")  # fmt: skip
SHORT_OPTIONS = {
    "J": "job-name",
    "o": "output",
    "e": "error",
    "N": "nodes",
    "n": "ntasks",
    "a": "array",
    "D": "chdir",
    "W": "wait",
    "t": "time",
}
# Options that ask for GPUs, whose names sbatch takes cut short, too (https://slurm.schedmd.com/sbatch.html, 2026-11-26).
_COUNTED = ("gpus", "gpus-per-node", "gres")
_HARMLESS = ("gpu-bind", "gpu-freq", "gres-flags")
# Whatever may ask for GPUs, shortened names included. --exclusive gives all GPUs of a node.
_MAY_COUNT = re.compile(r"--(gp|gr|tr|exclus)")


def arguments_problem(arguments: Sequence[str], command: str, reserved: Sequence[str]) -> str | None:
    """Return what is wrong with arguments of sbatch or srun that a user gives, or None.

    Both take an option's name cut short (getopt_long), so what a reserved name begins with is refused too.
    """
    for text in arguments:
        name = text[2:].partition("=")[0] if text.startswith("--") else SHORT_OPTIONS.get(text[1:2], text[1:2])
        if not text.startswith("-") or len(text) < 2:
            return f"{text!r} is not an argument of {command}: write --name=value, each as one entry"
        is_long = text.startswith("--") or name in SHORT_OPTIONS.values()
        if is_long and (ours := next((option for option in reserved if option.startswith(name)), "")):
            return f"{text!r} cannot be given: cloudtrain sets --{ours} itself"
    return None


KEYS = {
    "num_nodes": "--nodes",
    "min_nodes": "--nodes",
    "resources.accelerators": "--gpus-per-node",
    "resources.use_spot": "--partition, --qos",
    "resources.disk_gb": NO_EFFECT,
    "resources.cpus": "--cpus-per-task",
    "resources.memory": "--mem",
    "secrets.file": HONOURED,
    "limits.max_runtime": "--time",
    "retry.max_attempts": "--requeue",
    "roles.resources": "--cpus-per-task, --gpus-per-node, --mem",  # of a component of a heterogeneous job
    "roles.colocate": "--ntasks-per-node",
}
FIXES = {"disk-full": "check your quota of the shared folder (quota -s), choose another folder or output, or keep fewer "
         "checkpoints"}  # fmt: skip


def build_request(
    job: Job,
    manifest: Manifest,
    run_id: str,
    attempt: int,
    options: Mapping[str, Any],
    restarts: int,
    requeue_events: Sequence[str],
    slices: Slices | None = None,
) -> dict[str, Any]:
    """Return the request of an attempt: its folders, the arguments of sbatch and the batch script."""
    run_dir = f"{options['folder']}/runs/{run_id}"
    folder = f"{run_dir}/a{attempt}"
    umask = paths.umask(options.get("share"))
    output, _ = paths.output_path(job.output)
    if output:
        run_dir = f"{output.rstrip('/')}/{run_id}"
    env = manifest.environment() | {
        "CLOUDTRAIN_RUN_DIR": run_dir,
        "CLOUDTRAIN_RUN_DIR_SHARED": "1",
        "CLOUDTRAIN_STDIN": "1",
        "CLOUDTRAIN_UMASK": umask,
    }
    attempt_id, parts = manifest.attempt_id, components(job)
    needs = {
        **_hardware(*parts[0][::2] if parts else (job,)),
        "nodes": parts[0][1] if parts else manifest.nodes,
        "requeue": restarts > 0 or slices is not None,
        "minutes": slices.minutes if slices else -(-(manifest.max_runtime_s + MARGIN_S) // 60),
    }
    first = _with_gres(parts[0][0], job, options) if needs["gpus"] and parts else options
    argv = sbatch_arguments(attempt_id, run_id, folder, manifest, needs, first)
    for own, nodes, tasks in parts[1:]:
        allocated = _allocation(_hardware(own, tasks), _with_gres(own, job, options))
        argv[-1:-1] = [":", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", *allocated]
    return {
        "login": _describe_login(options.get("login") or {}),
        "folder": folder,
        "run_dir": run_dir,
        "umask": umask,
        "nodes": 1 if manifest.compat == "sbatch" else manifest.nodes,  # that have a log
        **({"machines": roles.machines(job)} if any(tasks > 1 for *_, tasks in parts) else {}),
        **({"starts": slices.count + restarts} if slices else {}),
        "sbatch": argv,
        "script": batch_script(
            attempt_id,
            folder,
            env,
            manifest,
            restarts,
            requeue_events,
            options,
            slices,
            [(nodes, tasks, _hardware(own, tasks)["cpus"]) for own, nodes, tasks in parts],
        ),
    }


def components(job: Job) -> list[tuple[Job, int, int]]:
    """Return the job, the nodes and the roles of each component of a job; [] where one allocation serves all roles alike."""
    own = {"roles.resources", "roles.colocate"}.intersection(rules.keys_in_use(job))
    return list(roles.on_own_machines(job)) if own else []


def _with_gres(own: Job, job: Job, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the GPUs of a component in `gres`."""
    gres = options.get("gres")
    if gres and own.resources != job.resources:
        gres = own.resources.gpus and f"{re.sub(r':[0-9]+$', '', gres)}:{own.resources.gpus}"
    return {**options, "gres": gres}


def _hardware(job: Job, tasks: int = 1) -> dict[str, Any]:
    memory = job.resources.memory_bytes
    return {
        "tasks": tasks,
        "gpus": job.resources.gpus,
        "cpus": -(-job.resources.cpus // tasks) if job.resources.cpus else None,
        "memory_mb": -(-memory >> 20) if memory else None,
        "spot": job.resources.use_spot,
    }


def _describe_login(login: Mapping[str, Any]) -> str | None:
    """Return the login node as ssh takes it, with its user where one is set; None where it is this machine."""
    address = login.get("address")
    return f"{login['user']}@{address}" if address and login.get("user") else address


def allowed_restarts(job: Job, attempt: int) -> tuple[int, list[str]]:
    """Return how often Slurm may requeue the job of an attempt, and after which events.

    A requeue begins the time limit anew: under a cap there is none, and the client starts the next attempt.
    """
    events: list[str] = [event for event in ("preempted", "lost") if event in job.retry.on_events]
    return max(0, job.retry.max_attempts - attempt) if events and not job.limits.capped else 0, events


def sbatch_arguments(
    attempt_id: str, run_id: str, folder: str, manifest: Manifest, needs: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """Return the arguments of sbatch; they override #SBATCH lines and the login node's SBATCH_* variables.

    `needs` are minutes, nodes, tasks, gpus, cpus, memory_mb, spot and requeue; `options` is the backend's own model as a
    dictionary.
    """
    is_body = manifest.compat == "sbatch"
    given = {text.partition("=")[0][2:] for text in options.get("directives", ())} if is_body else set()
    nodes = str(needs.get("nodes") or manifest.nodes)
    if manifest.min_nodes and manifest.min_nodes < manifest.nodes:
        nodes = f"{manifest.min_nodes}-{manifest.nodes}"
    argv = [
        "sbatch",
        "--parsable",
        f"--job-name={attempt_id}",
        f"--comment=cloudtrain {run_id}",
        *([] if manifest.nodes == 1 and "ntasks" in given else [f"--nodes={nodes}"]),
        *([] if is_body else [f"--ntasks-per-node={needs.get('tasks', 1)}"]),
        f"--time={needs['minutes']}",
        f"--output={folder.replace('%', '%%')}/slurm.out",  # %j and the like would be numbers
        "--open-mode=append",
        f"--chdir={folder}",
        "--export=NONE",
        "--requeue" if needs.get("requeue") else "--no-requeue",
    ]
    return [*argv, *_allocation({"gpus": manifest.gpus_per_node, **needs}, options, given), f"{folder}/job.sh"]


def _allocation(
    needs: Mapping[str, Any], options: Mapping[str, Any], given: AbstractSet[str] = frozenset()
) -> list[str]:
    """Return the arguments that each component of a job has of its own, without those `given` as directives."""
    argv: list[str] = []
    site_options = {name: options.get(name) for name in ("account", "qos", "constraint", "reservation")}
    if needs.get("spot") and options.get("spot_qos"):
        site_options["qos"] = options["spot_qos"]
    site_options = {"partition": partition_of(bool(needs.get("spot")), options), **site_options}
    if options.get("gres") and given.isdisjoint(("gres", "gpus")):
        argv.append(f"--gres={options['gres']}")
    elif (gpus := needs.get("gpus")) and given.isdisjoint(("gres", "gpus", "gpus-per-node", "gpus-per-task")):
        gpu_type = f"{options['gpu_type']}:" if options.get("gpu_type") else ""
        argv.append(f"--gpus-per-node={gpu_type}{gpus}")
    if needs.get("cpus") and "cpus-per-task" not in given:
        argv.append(f"--cpus-per-task={needs['cpus']}")
    if needs.get("memory_mb") and "mem" not in given:
        argv.append(f"--mem={needs['memory_mb']}M")
    argv += [f"--{name}={value}" for name, value in site_options.items() if value]
    if options.get("exclusive"):
        argv.append("--exclusive")
    return [*argv, *options.get("directives", ())]


def partition_of(spot: bool, options: Mapping[str, Any]) -> str:
    """Return the partition of a job, "" for the cluster's default."""
    return str((spot and options.get("spot_partition")) or options.get("partition") or "")


def time_limit(plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt; each requeue begins --time anew."""
    argv = plan.request["sbatch"]
    minutes = next(int(text.removeprefix("--time=")) for text in argv if text.startswith("--time="))
    restarts = plan.job["retry"]["max_attempts"] - plan.attempt if "--requeue" in argv else 0
    starts = plan.request.get("starts") or 1 + restarts
    return TimeLimit(starts * (minutes * 60 + KILL_WAIT_S), "the cluster's OverTimeLimit may allow more")


def check_job(job: Job, options: Mapping[str, Any]) -> list[Problem]:
    """Return what the job wants and this cluster does not have."""
    problems = []
    if not options.get("folder"):
        hint = "set it to a folder on the cluster's shared file system, in cloudtrain.toml"
        problems.append(Problem("is not given", "options.slurm.folder", hint))
    if job.resources.use_spot and not (options.get("spot_partition") or options.get("spot_qos")):
        hint = "set options.slurm.spot_partition or spot_qos to the partition or QOS whose jobs may be preempted"
        problems.append(Problem("is not configured for this cluster", "resources.use_spot", hint))
    if job.compat != "sbatch" and (wrong := arguments_problem(options.get("directives", ()), "sbatch", TASKS)):
        problems.append(Problem(wrong, "options.slurm.directives"))
    return problems + paths.output_path(job.output)[1] + paths.check_inputs(job)


def plan_notes(manifest: Manifest, restarts: int, slices: Slices | None, parts: int) -> Iterator[str]:
    """Yield what a user should know of the batch job before it is sent, one of `parts` components."""
    if parts > 1:
        yield (
            f"roles have resources of their own: a heterogeneous job of {parts} components, which Slurm's backfill "
            "scheduler starts together"
        )
    if slices:
        yield from slices.notes(manifest)
    if restarts:
        times = "once" if restarts == 1 else f"up to {restarts} times"
        yield f"a preempted job is requeued, {times}, and resumes from its newest checkpoint within this attempt"
    yield from manifest.notes()


def gpu_notes(job: Job, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the type of GPU that Slurm is asked for is not the one that the job names."""
    wanted, gpu_type = job.resources.accelerator, str(options.get("gpu_type") or "")
    if (
        job.compat == "sbatch"
        or not wanted
        or not job.resources.gpus
        or options.get("gres")
        or wanted.lower() in ("gpu", "any")
    ):
        return
    if not gpu_type:
        yield f"Slurm may give GPUs of any type, not only {wanted}: set options.slurm.gpu_type (`sinfo -o %G` lists types)"
    elif wanted.partition("-")[0].lower() not in gpu_type.lower():
        yield f"the job names {wanted}, and options.slurm.gpu_type requests {gpu_type}: Slurm gives {gpu_type}"


def count_gpus(arguments: Sequence[str], nodes: int) -> int | None:
    """Return how many GPUs a batch job gets on all of its nodes, None where its arguments do not say it.

    `nodes` are of a job without --nodes; each component of a heterogeneous job has its own, before its GPUs.
    """
    total = 0
    for text in arguments:
        if text.startswith("--nodes="):
            nodes = int(text.rpartition("-")[2].rpartition("=")[2])
        if text.startswith("-G"):
            text = f"--gpus={text[2:].strip(' =')}"
        if not _MAY_COUNT.match(text):
            continue
        name, _, value = text[2:].partition("=")
        if name in _HARMLESS or text in ("--exclusive=user", "--exclusive=mcs"):
            continue
        if name not in _COUNTED:
            return None
        for item in value.split(","):
            counted = _count(item) if name == "gres" else _typed(item)
            if counted is None:
                return None
            total += counted * (1 if name == "gpus" else nodes)
    return total


def _count(item: str) -> int | None:
    """Return the GPUs of one entry of --gres, None for a part of a GPU; other resources have none."""
    name, *rest = (
        (item.partition("(")[0] if item.endswith(")") else item).removeprefix("gres/").removeprefix("gres:").split(":")
    )
    if name in ("shard", "mps"):
        return None
    if name != "gpu":
        return 0
    if not rest or not rest[-1].isdigit():
        return 1 if len(rest) < 2 else None
    return int(rest[-1])


def _typed(item: str) -> int | None:
    """Return the GPUs of one entry of --gpus: 4, or a100:4."""
    last = item.rpartition(":")[2]
    return int(last) if last.isdigit() else None
