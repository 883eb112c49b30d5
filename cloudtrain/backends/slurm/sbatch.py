"""Read a batch script of Slurm as a job: its #SBATCH lines become keys, its body the `run` text of `compat: sbatch`.

Options and how their lines are read: doc/man/man1/sbatch.1 and src/sbatch/opt.c of Slurm 22.05 to 24.11 (2026-11-28).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cloudtrain.errors import Problem, page
from cloudtrain.job.document import Document
from cloudtrain.job.problems import fit_name

MARGIN_S = 300  # what the backend adds to limits.max_runtime for Slurm's own limit: signals come that much earlier


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SHORT = dict(zip("AabDMCScdmexBGhHiJLkFwNnoOspqQtvVW", _words(
    """account array begin chdir clusters constraint core-spec cpus-per-task dependency distribution error exclude
    extra-node-info gpus help hold input job-name licenses no-kill nodefile nodelist nodes ntasks output overcommit
    oversubscribe partition qos quiet time verbose version wait"""), strict=True))  # fmt: skip
FLAGS = _words(
    """contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue oom-kill-step overcommit
    oversubscribe parsable propagate quiet reboot requeue resv-ports spread-job stepmgr test-only usage use-min-nodes
    verbose version wait"""
)  # their value, if any, follows =
SITE = ("account", "partition", "qos", "constraint", "reservation")  # options.slurm has them
PASSED = _words(
    """acctg-freq batch bb begin cluster-constraint contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution exclude extra extra-node-info gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold kill-on-invalid-dep licenses mail-type
    mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill nodelist ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step overcommit oversubscribe power
    prefer priority profile propagate reboot resv-ports segment signal sockets-per-node spread-job stepmgr switches
    thread-spec threads-per-core time-min tmp tres-bind tres-per-task use-min-nodes wait-all-nodes wckey"""
)
_LOGS = "`cloudtrain logs RUN` prints the lines"
NAMED = {
    "output": _LOGS, "error": _LOGS, "open-mode": _LOGS, "comment": "a job has labels",
    **dict.fromkeys(("get-user-env", "ignore-pbs", "parsable", "quiet", "verbose"), "cloudtrain does not need it"),
}  # fmt: skip
_FILE, _WORDS = "write its content into the body", "give it to sbatch yourself, or remove the line"
REFUSED = {
    "array": "write a sweep over env.SLURM_ARRAY_TASK_ID: cloudtrain sweep",
    "chdir": "the body begins in the packaged folder; write cd into it",
    "clusters": "write a target for each cluster",
    **dict.fromkeys(("container", "container-id"), "use options.slurm.apptainer, or srun --container in the body"),
    **dict.fromkeys(("bbf", "export-file", "input", "nodefile"), _FILE),
    "wait": "use cloudtrain submit --wait",
    **dict.fromkeys(("wrap", "test-only", "uid", "gid", "help", "usage", "version"), _WORDS),
}
MAPPED = (*SITE, "exclusive", "job-name", "nodes", "time", "requeue", "no-requeue", "export")
KNOWN = (*PASSED, *MAPPED, *NAMED, *REFUSED)


class Directive(NamedTuple):
    """One option of a #SBATCH line."""

    line: int  # 1-based
    name: str
    value: str

    @property
    def argument(self) -> str:
        return f"--{self.name}={self.value}" if self.value else f"--{self.name}"


def is_job_file(text: str) -> bool:
    """Return whether a script has #SBATCH lines that sbatch would read."""
    return text.startswith("#!") and any(line.startswith("#SBATCH") for _, line in _header(text))


def _header(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield number, line


def directives(text: str, problems: list[Problem] | None = None) -> Iterator[Directive]:
    """Yield the options of a script's #SBATCH lines; what cannot be read is added to `problems`."""
    for number, line in _header(text):
        other = bool(re.match(r"#(PBS|BSUB)\b|#SBATCH\s+(hetjob|packjob)\b", line))
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else []
        except ValueError:
            other, words = True, []
        if other and problems is not None:
            hint = "write each option as #SBATCH --name=value, or remove the line"
            problems.append(Problem(f"{line[:80]} cannot be read", "", hint, line=number))
        while words and not other:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, equals, value = SHORT.get(word[1:2], word), word[2:], word[2:]
            elif name not in KNOWN and len(found := [each for each in KNOWN if each.startswith(name)]) == 1:
                name = found[0]
            if not equals and name not in FLAGS and words:
                value = words.pop(0)
            yield Directive(number, name, value)


def read(text: str, file: str) -> Document:
    """Return the job of a batch script; what is refused stands in the document's `problems`, with its line."""
    job: dict[str, Any] = {"compat": "sbatch"}
    lines: dict[tuple[str | int, ...], int] = {}
    slurm: dict[str, Any] = {}
    passed: dict[str, Directive] = {}
    problems: list[Problem] = []
    remaining: set[int] = set()  # lines whose options have no effect: they stay in the body, and a plan names them

    def put(line: int, **keys: Any) -> None:
        job.update(keys)
        lines.update({(key,): line for key in keys})

    for each in directives(text, problems):
        line, name, value = each
        try:
            if name in NAMED:
                remaining.add(line)
            elif name in REFUSED:
                raise ValueError(REFUSED[name])
            elif name == "job-name":
                put(line, name=fit_name(value), env={"SLURM_JOB_NAME": value, **job.get("env", {})})
            elif name == "nodes":
                fewest, _, most = value.partition("-")
                put(line, num_nodes=int(most or fewest), **({"min_nodes": int(fewest)} if most else {}))
            elif name == "time":
                put(line, limits={"max_runtime": _limit(value)})
            elif name in ("requeue", "no-requeue"):
                put(line, retry={"max_attempts": 3 if name == "requeue" else 1})
            elif name == "export":
                put(line, env={**job.get("env", {}), **dict(_exported(value))})
            elif name in SITE or each.argument == "--exclusive":
                slurm[name] = value or True
                lines["options", "slurm", name] = line
            elif name in PASSED or name == "exclusive":
                passed[name] = each
            else:
                raise ValueError("it is not an option of sbatch that is known: correct or remove it")
        except ValueError as error:
            hint = "write a number of nodes, such as 2 or 2-4" if name == "nodes" else str(error)
            problems.append(Problem(f"#SBATCH {each.argument} cannot be taken over", "", hint, line=line))
    if passed:
        slurm["directives"] = [_earlier(each) for each in passed.values()]
        lines.update({("options", "slurm", "directives", at): each.line for at, each in enumerate(passed.values())})
    resources = _resources({name: each.value for name, each in passed.items()}, job.get("num_nodes", 1))
    body = "".join(
        "#\n" if number not in remaining and line.startswith("#SBATCH") else line + "\n"
        for number, line in enumerate(text.splitlines(), 1)
    )
    job |= {"run": body} | ({"resources": resources} if resources else {})
    job |= {"options": {"slurm": slurm}} if slurm else {}
    document = Document.of(job, file, lines)
    document.problems += [replace(problem, file=file) for problem in problems]
    return document


def _limit(text: str) -> str:
    """Return a time limit: minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]; seconds round up."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found or not int(re.sub(r"\D", "", text)):
        raise ValueError("write a limit such as 90, 1:30:00 or 2-00:00:00")
    days, *parts = (int(part) if part else 0 for part in found.groups())
    if found[1] or found[4]:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, parts[:2]
    total = days * 1440 + hours * 60 + minutes + (seconds > 0)
    return f"{total}m" if total % 60 else f"{total // 60}h"


def _exported(value: str) -> Iterator[tuple[str, str]]:
    for item in re.split(r",(?=\w+=|\w+$|\w+,)", value):
        name, equals, text = item.partition("=")
        if equals:
            yield name, text
        elif name not in ("ALL", "NONE", "NIL", ""):
            raise ValueError(f"{name} has no value: use --env {name}")


def _earlier(each: Directive) -> str:
    """Return the argument of sbatch; a signal comes as long before max_runtime as it was to come before --time."""
    if each.name != "signal":
        return each.argument
    signal, _, seconds = each.value.partition("@")
    return f"--signal={signal}@{int(seconds or 60) + MARGIN_S}"


def tasks_per_node(given: Mapping[str, str], nodes: int) -> int:
    """Return how many tasks srun starts on a node, from options of sbatch."""
    if given.get("ntasks-per-node", "").isdigit():
        return int(given["ntasks-per-node"])
    return -(-int(given["ntasks"]) // nodes) if given.get("ntasks", "").isdigit() else 1


def _resources(given: Mapping[str, str], nodes: int) -> dict[str, Any]:
    """Return the hardware of a node, as costs and other targets need it."""
    tasks = tasks_per_node(given, nodes)
    gres = next((item[4:] for item in given.get("gres", "").split(",") if re.match(r"gpu\b", item)), None)
    each = {"gpus-per-node": 1.0, "gpus-per-task": tasks, "gpus": 1 / nodes}
    asked, factor = next(((given[name], factor) for name, factor in each.items() if name in given), (gres, 1.0))
    found: dict[str, Any] = {}
    if asked is not None:
        kind, _, count = asked.lstrip(":").rpartition(":")
        if not count.isdigit():
            kind, count = count, "1"
        kind = kind if re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", kind) else "gpu"
        found["accelerators"] = f"{kind}:{max(1, -(-int(count) * factor // 1)):.0f}" if int(count) else "0"
    if given.get("cpus-per-task", "").isdigit():
        found["cpus"] = int(given["cpus-per-task"]) * tasks
    if memory := re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", given.get("mem", ""), re.IGNORECASE):
        found["memory"] = f"{memory[1]}{(memory[2] or 'M').upper()}iB"
    return found


def notes(body: str) -> list[str]:
    """Return a sentence for each line of a body that has no effect."""
    return [
        f"#SBATCH {each.argument} has no effect: {NAMED.get(each.name) or 'write the key of the job'}"
        for each in directives(body)
    ]


# -- other targets ----------------------------------------------------------------------------------------------------

_BEFORE = re.compile(
    r'set (-[eux]+|-[eux]*o pipefail|\+e)|cd "?\$\{?SLURM_SUBMIT_DIR\}?"?|(export )?(MASTER_(ADDR|PORT)|WORLD_SIZE)=.*|#.*|'
)
_EXPORT = re.compile(r"""export ([A-Za-z_]\w*)=("[^"$`\\]*"|'[^']*'|[^\s"'$`\\;&|<>]*)""")
_SRUN = re.compile(
    r"srun((?:\s+(?:-[ulKQ]+|--unbuffered|--label|--quiet|--kill-on-bad-exit(?:=1)?|--cpu-bind=\S+|--mpi=\S+|--export=ALL))*)\s+"
)
_VARIABLE = re.compile(r"\$\{?(SLURM_NNODES|SLURM_JOB_NUM_NODES|SLURM_NODEID|SLURM_PROCID|SLURM_JOB_?ID)\b\}?")
_VARIABLES = {
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "CLOUDTRAIN_NUM_NODES"),
    **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), "CLOUDTRAIN_NODE_RANK"),
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "CLOUDTRAIN_RUN_ID"),  # one for all nodes, as --rdzv-id wants it
}
_HARDWARE = {"gpus-per-node", "gpus-per-task", "gpus", "gres", "cpus-per-task", "mem", "ntasks", "ntasks-per-node"}


def fit_backend(whole: Document, backend: str, site: Sequence[str] = ()) -> None:
    """Change a job of a batch script, in place, to one of its backend; a job without `compat: sbatch` stays as it is.

    Args:
        whole: The job over everything that is configured.
        backend: Its backend's name. Only Slurm runs the body as it is.
        site: `directives` of the target, which those of the script follow.
    """
    body = whole.value.get("run")
    if whole.value.get("compat") != "sbatch" or not isinstance(body, str):
        return
    options = whole.value.get("options", {}).get("slurm", {}) if isinstance(whole.value.get("options"), dict) else {}
    own = options.get("directives") or []
    if backend == "slurm":
        if site and own[: len(site)] != list(site):
            mark = whole.mark(("options", "slurm", "directives"))
            whole.put(("options", "slurm", "directives"), Document.of([*site, *own], mark.file))
        return
    given = {each.name: each.value for each in directives("".join(f"#SBATCH {shlex.quote(word)}\n" for word in own))}
    mark = whole.mark(("run",))
    try:
        keys = _mapped(body, int(whole.value.get("num_nodes", 1)), given)
    except _NotMapped as error:
        message = f"{error.text[:80]} cannot run on {backend}: {error.why}"
        hint = f"submit to a Slurm target, or write a job file: {page('From sbatch')}"
        whole.problems.append(Problem(message, "run", hint, mark.file, (mark.line or 0) + error.line))
        return
    only = sorted(options.keys() - {"directives"} | given.keys() - _HARDWARE)
    whole.notes += notes(body)
    if only:
        whole.notes.append(f"without effect on {backend}: {', '.join(f'--{name}' for name in only)} of #SBATCH lines")
    for name in ("run", "compat"):
        del whole.value[name]
    for name, value in keys.pop("env").items():
        whole.put(("env", name), Document.of(value, mark.file))
    for name, value in keys.items():
        whole.put((name,), Document.of(value, mark.file))


class _NotMapped(Exception):
    def __init__(self, line: int, text: str, why: str) -> None:
        super().__init__(text)
        self.line, self.text, self.why = line, text, why


def _mapped(body: str, nodes: int, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys that do on every node what a body of one command does; raises _NotMapped with the line."""
    env: dict[str, str] = {}
    commands: list[tuple[int, str]] = []
    if not re.match(r"#!\s*\S*/(env )?(ba|da|z)?sh\b", body):
        raise _NotMapped(1, body.partition("\n")[0], "it is not the first line of a shell script")
    first, text = 1, ""
    for number, line in enumerate(body.splitlines(), 1):
        first, text = (number, line.strip()) if not text else (first, f"{text} {line.strip()}")
        if text.endswith("\\"):
            text = text[:-1].rstrip()
            continue
        if _BEFORE.fullmatch(text):
            pass
        elif export := _EXPORT.fullmatch(text):
            env[export[1]] = export[2].strip("\"'")
        else:
            commands.append((first, text))
        text = ""
    if not commands:
        raise _NotMapped(1, "the body", "it has no command")
    at, text = commands[0]
    if len(commands) > 1:
        at, text = next((each for each in commands if not _launch(each[1])), commands[1])
        raise _NotMapped(at, text, "it is not the one command of the body")
    if not (launch := _launch(text)):
        raise _NotMapped(at, text, "the body must be one line of srun, torchrun, accelerate launch or python")
    step, command = launch
    tasks = tasks_per_node(given, nodes)
    if not step and nodes > 1:
        raise _NotMapped(at, text, f"without srun it runs on the first of {nodes} nodes only")
    keys: dict[str, Any] = {"env": env}
    if not command.startswith("python"):
        if step and tasks > 1:
            raise _NotMapped(at, text, f"srun starts it {tasks} times on a node, and it starts the ranks itself")
        run = _VARIABLE.sub(lambda found: f"${_VARIABLES[found[1]]}", command)
        if left := re.search(r"\$\{?(?!CLOUDTRAIN_|MASTER_(?:ADDR|PORT)\b)[\w(]+", run):
            raise _NotMapped(at, text, f"{left[0]} is not known there")
        return {**keys, "run": run}
    words = [word for word in shlex.split(command)[1:] if word != "-u"]
    if words[:1] == ["-m"] and len(words) > 1:
        words = [f"-m {words[1]}", *words[2:]]
    elif "$" in command or not words or not words[0].endswith(".py"):
        raise _NotMapped(at, text, "only a script or -m with plain arguments is mapped")
    return {**keys, "entrypoint": words[0], "args": words[1:], "processes_per_node": tasks if step else 1}


def _launch(text: str) -> tuple[bool, str] | None:
    """Return whether a line is a step of srun, and the command that it starts; None where it starts no training."""
    step = _SRUN.match(text)
    command = text[step.end() :] if step else text
    plain = not re.search(r"[;&|<>`*?]|\$\(", command)
    return (bool(step), command) if plain and re.match(r"(torchrun|accelerate launch|python3?)\s", command) else None
