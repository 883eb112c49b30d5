"""What is configured, and how a job is resolved over it.

`cloudtrain.toml` stands in the user's configuration folder ($CLOUDTRAIN_CONFIG_HOME moves it) and in the project, at
or above the job file's folder (the nearest one counts). It holds `[defaults]`, values of jobs, and named targets:
`[targets.prod]` with `backend = NAME`, options of that backend, and `defaults`, values of jobs on that target.
Precedence, weakest first: defaults, the user's file, the project's file, the target's, the job file, `--set`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.errors import BadJob, BadRequest, Problem, UnknownBackend
from cloudtrain.job.document import Document, Mark, written
from cloudtrain.job.homes import home as home
from cloudtrain.job.providers import DEFAULT_TARGET

if TYPE_CHECKING:
    from cloudtrain.job.configfile import Target
    from cloudtrain.job.job import Job

CONFIG_FILE = "cloudtrain.toml"
PRICE = ("resources", "usd_per_hour")
PRICE_KEYS = ("usd_per_hour", "priced_as")  # of a target, beside the options of its backend
SUBMITTER_LABEL = "submitted_by"  # who submitted a run whose job names another `user`; the planner alone sets it
HOME_LABEL = "cloudtrain_home"  # Vertex AI's filters take no dash in a label's name
_CHOSEN = (("target",), ("resources", "accelerators"))  # the keys that take several candidates, as in Choice


@dataclass(frozen=True)
class Resolved:
    """A validated job with its target and backend, and the document that it was made from."""

    job: Job
    target: str
    backend: str
    options: Mapping[str, Any]  # of that backend, not yet validated
    document: Document
    target_prices: bool = False  # resources.usd_per_hour is the target's usd_per_hour

    @property
    def origins(self) -> dict[str, str]:
        """Where each value was written, by dotted path: job.yaml:3, cloudtrain.toml:7, --set, --target, Job or default."""
        return _origins(self.job, self.document)


class Choice(NamedTuple):
    """One candidate of a job that names several targets or accelerators; None where the job names one or none."""

    target: str | None = None
    accelerators: str | None = None


def submitter(labels: Mapping[str, str]) -> str | None:
    """Return who submitted a run, from its labels: a job can set `user`, but not that."""
    return labels.get(SUBMITTER_LABEL) or labels.get("user")


def config_files(start: Path, name: str = CONFIG_FILE) -> list[Path]:
    """Return the configuration files that exist, the weakest first: the user's, then the nearest project's.

    `name` is that of another file in the same folders.
    """
    if chosen := os.environ.get("CLOUDTRAIN_CONFIG_HOME"):
        user = Path(chosen).expanduser() / name
    else:
        from platformdirs import user_config_path

        user = user_config_path("cloudtrain") / name
    here = start.absolute()
    project = next((folder / name for folder in (here, *here.parents) if (folder / name).is_file()), None)
    return [path for path in dict.fromkeys((user, project)) if path is not None and path.is_file()]


def named_targets(start: Path | None = None) -> dict[str, Target]:
    """Return the targets that a job file in this folder (or the current one) can name; raises BadRequest."""
    return _read_config(start or Path.cwd())[1]


def default_target(start: Path) -> Any:
    """Return the target that the configuration gives jobs of a folder: a name, a list of names, or None; raises BadRequest."""
    return _stack(_read_config(start)[0], (), None).value.get("target")


def options_of(target: Target) -> dict[str, Any]:
    """Return the options of a target that are its backend's own: without the prices of its machines."""
    return {name: value for name, value in target.options.value.items() if name not in PRICE_KEYS}


def choices(
    job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
    sets: Sequence[str] = (),
    *,
    target: str | None = None,
) -> list[Choice]:
    """Return the candidates of a job as `resolve` takes them, in the order written; one where it names no lists.

    Blocking: reads the job file and the configuration. Raises BadJob, BadRequest.
    """
    own, folder = _document(job)
    whole = _stack([*_read_config(folder)[0], own], sets, target)
    named: list[Sequence[str | None]] = [_listed(whole, path) or [None] for path in _CHOSEN]
    return [Choice(*pair) for pair in product(*named)]


def resolve(
    job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
    sets: Sequence[str] = (),
    *,
    target: str | None = None,
    backends: Collection[str] = (),
    choice: Choice | None = None,
    over: Sequence[Document] = (),
) -> Resolved:
    """Return a job (file, dictionary, Job, or a document and its folder) laid over everything that is configured, with
    settings over it.

    `target` names a backend or a target, and wins over the job's own; `backends` are the names that exist (none: any is
    taken); `choice` is one of `choices`, None for the first; `over` wins over the settings: what a policy sets.

    Blocking: reads the job file and the configuration. Raises BadJob with all of its problems, BadRequest,
    UnknownBackend.
    """
    from cloudtrain.job.job import Job

    own, folder = _document(job)
    layers, named = _read_config(folder)
    whole = _stack([*layers, own], sets, target, choice or Choice())
    chosen = named.get(str(whole.value.get("target") or DEFAULT_TARGET))
    price: Mark | None = None  # of the target
    if chosen:  # its options stand below those of the job file
        options = Document.of({}, "")
        options.put(("options", chosen.backend), chosen.options)
        for name in PRICE_KEYS:  # of each target: what its machines cost
            if (value := options.value["options"][chosen.backend].pop(name, None)) is not None:
                mark = chosen.options.mark((name,))
                put = Document(value, {(): Mark(mark.file, mark.line, written(value))})
                options.put(("resources", name), put)
        price = options.marks.get(PRICE)
        whole = _stack([*layers, chosen.defaults, options, own], sets, target, choice or Choice())
    for document in over:
        whole.overlay(document)
    if "compat" in whole.value:
        from cloudtrain.job import forms

        if form := forms.of_compat(whole.value["compat"]):
            site = chosen.options.value.get("directives") or [] if chosen else []
            target = str(whole.value.get("target") or DEFAULT_TARGET)
            form.fit_backend(whole, chosen.backend if chosen else target, site)
    try:
        made = Job.from_document(whole, folder)
    except BadJob as error:
        reported_paths = {problem.path for problem in error.problems}
        raise BadJob(
            [*error.problems, *(problem for problem in _absent(whole, folder) if problem.path not in reported_paths)]
        ) from None
    backend = chosen.backend if chosen else str(made.target)
    if backends and backend not in backends:
        raise _unknown(str(made.target), backend, sorted(backends), named)
    return Resolved(made, str(made.target), backend, made.options.get(backend, {}), whole,
                    price is not None and whole.marks.get(PRICE) == price)  # fmt: skip


def _read_config(folder: Path) -> tuple[list[Document], dict[str, Target]]:
    """Return the defaults of each configuration file, the weakest first, and the targets of all; reads them."""
    if not (paths := config_files(folder)):
        return [], {}
    from cloudtrain.job.configfile import part, read, targets

    documents = [read(path) for path in paths]
    return [part(document, ("defaults",)) for document in documents], targets(documents)


def _document(
    job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
) -> tuple[Document, Path]:
    from cloudtrain.job.job import Job, read

    if isinstance(job, tuple):
        return job
    if isinstance(job, Job):
        return Document.of(job.to_dict(given=True), "Job"), Path.cwd()
    if isinstance(job, Mapping):
        return Document.of(dict(job), "Job"), Path.cwd()
    if not isinstance(job, str | os.PathLike):
        raise BadRequest(f"{job!r} is no job", "give a Job, a dictionary with its keys, or the path of a job file")
    if Path(job).suffix == ".py":
        hint = f'give its job: {{"entrypoint": "{Path(job).name}"}}'
        raise BadRequest(f"{os.fspath(job)} is a script, not a job file", hint)
    return read(job)


def _stack(
    layers: Sequence[Document], sets: Sequence[str], target: str | None, choice: Choice | None = None
) -> Document:
    """Return documents laid over each other, with settings over them; `choice` replaces lists of candidates."""
    whole = Document.of({}, "")
    for layer in layers:
        whole.overlay(layer)
    if sets:  # `doctor` has none, and starts without pydantic
        from cloudtrain.job.job import apply_sets

        apply_sets(whole, sets)
    if target is not None:
        whole.put(("target",), Document.of(target, "--target"))
    for path, wanted in zip(_CHOSEN, choice or (), strict=False):
        if listed := _listed(whole, path):
            at = listed.index(wanted or listed[0])
            whole.put(path, Document(listed[at], {(): whole.mark((*path, at))}))
    return whole


def _listed(whole: Document, path: tuple[str, ...]) -> list[str]:
    """Return the texts of a list of candidates; [] where something else stands there."""
    value = whole.value
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    items = value if isinstance(value, list) else []
    return [] if any(isinstance(item, dict | list | None) for item in items) else [str(item) for item in items]


def _absent(whole: Document, folder: Path) -> list[Problem]:
    """Return what is not there of the source that a wrong job names: else packaging would say so next, and only then."""
    from cloudtrain.job.problems import located

    source, script = whole.value.get("source", "."), whole.value.get("entrypoint")
    if not isinstance(source, str) or not source or source.startswith("git+"):
        return []
    try:
        root = folder / Path(source).expanduser()
        if not root.is_dir():
            state = "is not a directory" if root.exists() else "does not exist"
            return [located(Problem(f"{root} {state}", "source", "source must be the directory to package"), whole)]
        if isinstance(script, str) and script and not script.startswith("-m") and not (root / script).exists():
            hint = "correct the file's name, or set source to the folder that contains it"
            return [located(Problem(f"{script} does not exist in {root}", "entrypoint", hint), whole)]
    except (OSError, RuntimeError, ValueError):
        pass  # not a path, or a home that is unknown: packaging reports it
    return []


def _unknown(target: str, backend: str, backends: Sequence[str], named: Mapping[str, Target]) -> UnknownBackend:
    from cloudtrain.job.problems import nearest

    known = target in named  # it names a backend that no installed package has
    message = f"the target {target} has no backend: {backend}" if known else f"there is no target {target}"
    near = nearest(backend, backends if known else [*backends, *named])
    hint = f"did you mean {near}? " if near else ""
    hint += f"backends are {', '.join(backends)}"
    hint += (
        f"; targets are {', '.join(sorted(named))}"
        if named
        else f"; targets are defined in {CONFIG_FILE} as [targets.NAME]"
    )
    return UnknownBackend(message, hint)


def _origins(job: Job, document: Document) -> dict[str, str]:
    """Return where every value of a job was written; `default` for what was not written."""
    from cloudtrain.job.problems import dotted

    written = {
        dotted(path): f"{mark.file}:{mark.line}" if mark.line else mark.file
        for path, mark in document.marks.items()
        if path and mark.file
    }
    origins = {}
    for path in _leaves(job.to_dict(), ()):
        name = ".".join(path)
        short = name.removesuffix(".uri") if path[0] == "inputs" else name
        origins[name] = written.get(name) or written.get(short) or "default"
    return origins


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif path:
        yield path
