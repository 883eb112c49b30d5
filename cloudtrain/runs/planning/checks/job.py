"""What a check is given, and the checks that read the job, its plan, and the code that runs on a node.

That code is asked whether it would refuse a job, so that a plan says the same sentence.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.backends.images import library_versions, parse_reference, python_version
from cloudtrain.backends.plan import Fact, Note, say
from cloudtrain.backends.traits import NO_EFFECT
from cloudtrain.errors import Problem
from cloudtrain.history import audit
from cloudtrain.job import launchers, placeholders, rules, targets
from cloudtrain.job.arguments import flat
from cloudtrain.runs.planning import upstream
from cloudtrain.source.node_code import CALL, IN_MEMORY, module

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.job.job import Job
    from cloudtrain.job.sections import Input
    from cloudtrain.source.texts import Texts


# MAX_ARG_STRLEN, with the zero at its end, and a quarter of a stack of 8 MiB: man 2 execve, Limits on size of arguments and
# environment (2026-11-29). What a node's own variables need is left out.
WORD_BYTES, ALL_BYTES = 128 << 10, 2 << 20


@dataclass(frozen=True)
class Case:
    """A planned job.

    Attributes:
        job: as it is planned, with what its script needs.
        plan: with the backend's own notes; not checked by policies yet.
        source: what the source's files hold, read when a check looks at it.
        backend: that made the plan.
        found: what the planner found out while it made the plan.
        policies: notes on what policies have set.
    """

    job: Job
    plan: Plan
    source: Texts
    backend: Backend
    found: Sequence[str | Problem] = ()
    policies: Sequence[str] = ()

    @property
    def command(self) -> str:
        """The text of the job's shell, or its words joined by spaces."""
        return self.job.run or " ".join(self.job.argv())

    @property
    def gpus(self) -> int:
        """GPUs of a node, as the backend gives them."""
        return int(self.plan.manifest.get("gpus_per_node") or 0)


def audit_elsewhere(case: Case) -> Iterator[Problem]:
    """Refuse an audit log in a folder that this machine cannot write."""
    job, plan = case.job, case.plan
    if job.audit and "://" not in str(job.output) and not audit.output_is_here(plan.backend, job):
        message = f"is written from this machine, and {job.output} is on the machines of {job.target}"
        yield Problem(message, "audit", "use an output in s3://, gs:// or az://, or leave audit out")


def too_long(case: Case) -> Iterator[Problem]:
    """Refuse variables and arguments with which the operating system of a node starts no process."""
    sent, hint = case.plan.manifest, "put it into a file of the source, and pass the file's name"
    words = ("run" if case.job.run else "args", [*sent["argv"], *sent.get("resume_args", ())])
    texts = [(f"env.{name}", f"{name}={value}") for name, value in sent.get("env", {}).items()]
    texts += [(words[0], word) for word in words[1]]
    sizes = [(key, len(text.encode(errors="surrogateescape")) + 1) for key, text in texts]
    for key, size in sizes:
        if size > WORD_BYTES:
            yield Problem(f"is {size:,} bytes long; Linux starts no process with one over {WORD_BYTES:,}", key, hint)
    total = sum(size + 8 for _, size in sizes)  # with its pointer
    if total > ALL_BYTES:
        largest = max(sizes, key=lambda each: each[1])[0]
        message = (
            f"is the largest of variables and arguments that have {total:,} bytes together; Linux takes {ALL_BYTES:,}"
        )
        yield Problem(message, largest, hint)


def given_twice(case: Case) -> Iterator[str | Problem]:
    """Refuse a hyperparameter that is among the arguments too, where it would win without a word."""
    job, args = case.job, case.job.args
    if job.form != "script" or not args:
        return
    for name in flat(job.hyperparameters):
        flag = name if job.arg_style == "hydra" else f"--{name}"
        at = next((at for at, word in enumerate(args) if word.partition("=")[0] == flag), None)
        if at is None or (job.arg_style == "hydra" and args[at] == flag):
            continue
        message = f"is given by args too, and what comes last counts: {shlex.join(args[at : at + 2])}"
        if case.plan.attempt > 1:
            yield f"hyperparameters.{name} {message}"
        else:
            yield Problem(message, f"hyperparameters.{name}", f"change it there: --set args='{json.dumps(args)}'")


def missing_inputs(case: Case) -> Iterator[Problem]:
    """Refuse an input that is not on this machine, which is the node; a run that this one waits for may write it."""
    job = case.job
    here = case.backend.traits.paths is Paths.HERE and not job.after and job.entrypoint != IN_MEMORY
    paths = {name: _here(item, here) for name, item in job.inputs.items()}
    for name, path in paths.items():
        if path and not Path(path).expanduser().exists():
            yield Problem(f"{path} does not exist on this machine", f"inputs.{name}", "correct the path")


def launcher_nodes(case: Case) -> Iterator[str]:
    """Say where a launcher in a command expects other nodes than the job has."""
    if case.job.form != "script":
        note = launchers.nodes_note(case.command, case.job.main_nodes, is_text=bool(case.job.run))
        yield from [note] * bool(note)


def idle_gpus(case: Case) -> Iterator[str]:
    """Say where a node has more GPUs than processes."""
    if case.job.form != "script":
        note = launchers.gpus_note(case.command, case.gpus, case.job.main_nodes)
        yield from [note] * bool(note)
        return
    ranks, gpus = int(case.plan.manifest["processes_per_node"]), case.gpus
    if ranks < gpus:
        condition = "" if case.job.trainer else ", unless a process itself uses several"
        yield (
            f"{ranks} process{'es' * (ranks != 1)} on the {gpus} GPUs of a node: {gpus - ranks} of them"
            f" {'is' if gpus - ranks == 1 else 'are'} idle{condition}; remove processes_per_node to start one for each GPU"
        )


def unlimited_wait(case: Case) -> Iterator[str]:
    """Say where the platform does not end a wait for machines."""
    job, name = case.job, case.plan.backend
    if not job.limits.max_wait or "limits.max_wait" in registry.traits(name).keys:
        return
    if say(case.plan.notes, Fact.WAIT_UNLIMITED):
        return
    text = f"{name} itself does not end a wait for machines: limits.max_wait needs several targets or GPUs"
    if job.num_nodes > 1:
        between = "limits.max_wait bounds only how long nodes wait for each other"
        text = f"{name} does not end a wait for machines: {between}"
    yield Note(text, Fact.WAIT_UNLIMITED)


def without_effect(case: Case) -> Iterator[str]:
    """Name the resources that the backend reserves nowhere."""
    keys = registry.traits(case.plan.backend).keys
    used = rules.keys_in_use(case.job)
    if named := [key for key, becomes in keys.items() if becomes == NO_EFFECT and key in used]:
        yield f"{', '.join(named)}: without effect on {case.plan.backend}, which does not reserve resources"


def unknown_gpu(case: Case) -> Iterator[str]:
    """Name the GPU that an unknown one is probably a mistyped form of."""
    if not (gpu := case.job.resources.accelerator):
        return
    from cloudtrain.backends import machines

    if meant := machines.similar_accelerator(gpu):
        yield f"{gpu} is not a GPU that cloudtrain knows; did you mean {meant}? (resources.accelerators)"


def set_by_policies(case: Case) -> Iterator[str]:
    """Say what policies have set."""
    yield from case.policies


def unused_keep_limit(case: Case) -> Iterator[str]:
    """Say where keep_limit limits nothing."""
    if case.job.keep_limit and case.job.keep != "auto":
        yield "keep_limit has no effect: it limits keep: auto only"


def placeholders_in_shell(case: Case) -> Iterator[str]:
    """Name a placeholder in a shell text, where none is replaced."""
    programs = [("", case.job), *((f"roles.{name}.", role) for name, role in case.job.roles.items())]
    texts = [(at + key, getattr(program, key)) for at, program in programs for key in ("run", "setup")]
    for key, text in texts:
        if text and (name := next(placeholders.names(text), "")):
            yield f"{key} is never changed: {{{name}}} arrives as it is; write {placeholders.variable(name)}"


def another_user(case: Case) -> Iterator[str]:
    """Say whom costs and lists name, where the job names another user."""
    labels = case.job.labels
    if me := labels.get(targets.SUBMITTER_LABEL):
        yield f"labels.user is {labels['user']}, but you are {me}: costs and lists name you (submitted_by)"


def source_in_output(case: Case) -> Iterator[str]:
    """Say who can read the source in an output."""
    if case.job.output and not case.job.allow_secrets:
        yield (
            f"the source goes to {case.job.output} too: everyone who can read it can attach to the run and resume it"
        )


def found_while_planning(case: Case) -> Iterator[str | Problem]:
    """Pass on what the planner has set for the job, and whether it fits on its GPUs."""
    yield from case.found


def inputs_of_runs(case: Case) -> Iterator[str]:
    """Say where the inputs are that name a run."""
    for name, item in case.job.inputs.items():
        if item.run:
            yield f"input {name} is the {upstream.describe_input(item.model_dump())}"


def other_tools(case: Case) -> Iterator[str]:
    """Say what `compat` does to a shell text."""
    if case.job.compat == "skypilot":
        yield "compat: skypilot: run and setup continue after a command that fails, as in SkyPilot"
    elif case.job.compat == "dstack":
        yield "compat: dstack: a pipeline in run or setup fails only where its last command does, as in dstack"
    elif case.job.compat == "sbatch":
        yield f"compat: sbatch: run is executed on the first node, and srun starts steps on all {case.job.num_nodes}"
        from cloudtrain.job import forms

        if form := forms.of_compat(case.job.compat):
            yield from form.notes(case.command)


def renamed(case: Case) -> Iterator[str]:
    """Say how a name was changed for platforms."""
    job = case.job
    if job.renamed:
        yield (
            f"the job name {job.renamed} is changed to {job.name}, because platforms allow only small letters, digits and -"
        )


def once_per_node(case: Case) -> Iterator[str]:
    """Say that a command starts its own processes."""
    if case.job.form != "script" and case.job.compat != "sbatch":
        yield "it runs once per node and may start its own processes, so only the number of nodes is checked"


def refusals(case: Case) -> Iterator[Problem]:
    """Refuse what a node would refuse."""
    made = case.plan.manifest  # the platform's machine may have given the number of ranks
    nodes = case.plan.main_nodes
    world = nodes * made["processes_per_node"]
    images = case.backend.facts(case.plan).images or ()
    here = case.backend.traits.paths is Paths.HERE
    yield from find_refusals(case.job, made["parallelism"], world, nodes, case.source.root, images, here)


def lost_values(case: Case) -> Iterator[Problem]:
    """Refuse the call of a function whose value nothing would keep."""
    traits = case.backend.traits
    kept = traits.own_machines or traits.packs or case.plan.manifest.get("output") or case.job.output
    if case.job.entrypoint == CALL and not kept:
        yield Problem("is needed: the value of a function is kept there", "output", "name a bucket or a mounted path")


def notes_of_nodes(case: Case) -> Iterator[str]:
    """Say what a node would do that a user may not expect."""
    job = case.job
    if job.trainer:
        layout = case.plan.manifest["parallelism"]
        yield from module("trainer.preview").notes(job.argv()[1:], layout, case.source.root, bool(job.setup))


def find_refusals(
    job: Job,
    parallelism: Mapping[str, Any],
    world: int,
    nodes: int,
    source: Path | None = None,
    images: Iterable[str] = (),
    local: bool = False,
) -> list[Problem]:
    """Return why a node would refuse a job of `world` processes.

    Args:
        job: the job.
        parallelism: its section, as the launcher's manifest has it.
        world: processes of all nodes.
        nodes: number of nodes.
        source: the source's folder, from which a script or a task of your own is read; None where there is none yet.
        images: container images of the nodes, as far as they are known.
        local: whether the nodes are this machine, so that paths of inputs are its own.
    """
    in_memory = job.entrypoint == IN_MEMORY
    if job.trainer or in_memory:
        parallelism = {} if parallelism.get("strategy") == "auto" else parallelism
        # In memory the script has the data, and set-up commands may download what is not in the source.
        inputs = None if in_memory or job.setup else {name: _here(value, local) for name, value in job.inputs.items()}
        found = module("trainer.preview").problems(job.argv()[1:], parallelism, world, nodes, in_memory, source, inputs)
        problems = [Problem(sentence, _path(sentence)) for sentence in found]
        if in_memory and local:
            problems += _missing_folders(job)
        return problems + _version_problems(parallelism, world, nodes, images)
    if job.entrypoint == CALL:
        return _python_problems(job, images)
    if job.form == "script" and source is not None:
        try:
            module("launcher.prepare.declared").check(job.argv(), parallelism, str(source))
        except module("launcher.errors").Refused as refusal:
            return [Problem(str(refusal), _path(str(refusal)))]
    return []


def _python_problems(job: Job, images: Iterable[str]) -> list[Problem]:
    """Return which images have another Python than the one that pickled the code of a function."""
    written = job.args[job.args.index("--python") + 1] if "--python" in job.args[:-1] else ""
    others = {image: version for image in images if (version := python_version(image)) not in ("", written)}
    hint = "choose an image of this Python, or move the function into a module, which travels as source"
    return [
        Problem(f"{image} has Python {version}, and the function is pickled with Python {written}", "image", hint)
        for image, version in others.items()
        if written
    ]


def _missing_folders(job: Job) -> list[Problem]:
    """Return which folders of data in memory this machine, which is the node, does not have."""
    paths = {name: Path(_here(value, True)) for name, value in job.inputs.items() if _here(value, True)}
    hint = "write it with save_to_disk of datasets"
    found = [(name, path) for name, path in paths.items() if not (path / "state.json").is_file()]
    return [Problem(f"{path} is not a folder that save_to_disk wrote", f"inputs.{name}", hint) for name, path in found]


def _here(value: Input, local: bool) -> str:
    """Return an input's path on this machine, "" where only its nodes have it."""
    path = value.uri.removeprefix("file://")
    return path if local and "://" not in path and value.run is None else ""


def _version_problems(parallelism: Mapping[str, Any], world: int, nodes: int, images: Iterable[str]) -> list[Problem]:
    """Return what images lack whose names say the versions of their libraries."""
    problems = []
    for image in images:
        versions, where = library_versions(image), f"in {parse_reference(image).name.rpartition('/')[2]}"
        for sentence in module("trainer.preview").version_problems(parallelism, world, nodes, versions, where):
            path = "image" if sentence.startswith("the shared trainer") else _path(sentence)
            problems.append(Problem(sentence, path, "make image-gpu builds one with newer versions"))
    return problems


def _path(sentence: str) -> str:
    """Return the key of the job file that a sentence is about."""
    from cloudtrain.job.sections import Parallelism

    if option := re.search(r"--([a-z]\w*)", sentence):
        return f"hyperparameters.{option[1]}"
    named = (word for word in re.findall(r"\w+", sentence) if word in Parallelism.model_fields and word != "strategy")
    return f"parallelism.{next(named, 'strategy')}"
