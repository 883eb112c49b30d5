"""Drafts of new jobs: the form being edited, its problems, its plan, and its submit.

All methods block and may run in any thread: each opens the history itself. Problems come from Job, Submitter, backend
and packaging; this module adds no checks of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan
from cloudtrain.console.fields import job_fields
from cloudtrain.console.form import JOB_FILE, Form, lean
from cloudtrain.console.jobtext import Table
from cloudtrain.errors import BadJob, BadRequest, BadSource, CloudtrainError, MissingExtra, Problem, UnknownBackend
from cloudtrain.job.document import Document
from cloudtrain.job.fields import main_role
from cloudtrain.job.problems import dotted
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.planning.checks.job import find_refusals
from cloudtrain.source.bundle import Bundle, File, list_files
from cloudtrain.source.node_code import CALL

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.submit import Submitter

SUFFIXES = (".yaml", ".yml", ".json")
_SOURCE_KEYS = ("source", "entrypoint", "environment", "allow_secrets", "allow_large", "allow_pointers")


@dataclass(frozen=True)
class Listing:
    """The files that a source would send, as `cloudtrain plan --files` shows them."""

    root: str
    files: Sequence[File]
    packed_bytes: int = 0  # 0 where packaging was refused
    commit: str = ""
    problem: Problem | None = None


@dataclass(frozen=True)
class Review:
    """The job file with its plan, or with the problems that prevent one."""

    text: str
    problems: Sequence[Problem]
    plan: Plan | None = None
    bundle: Bundle | None = None


class Draft:
    """A form that becomes a job file or a run. Files are written only below `root`."""

    def __init__(self, form: Form, home: Path, root: Path, *, parent: str = "", watch: bool = True) -> None:
        self.form = form
        self.original = form.copy()  # as it was opened
        self.home = home
        self.root = root
        self.parent = parent  # id of the run that it was opened from
        self.same_source = bool(parent)  # reuse the parent's packaged source, as `cloudtrain rerun` does
        self.name = JOB_FILE  # of the job file, below the root
        self.watch = watch
        self._submitted: dict[str, Run] = {}
        self._submit_lock = Lock()

    @classmethod
    def blank(cls, home: Path, root: Path, *, watch: bool = True) -> Draft:
        """Return an empty draft."""
        return cls(Form.blank(root), home, root, watch=watch)

    @classmethod
    def for_folder(cls, home: Path, root: Path, *, watch: bool = True) -> Draft:
        """Return the first draft for a folder: its name, and the script that `cloudtrain init` would choose."""
        from cloudtrain.cli.init import USUAL_SCRIPTS
        from cloudtrain.job.job import fit_name

        draft = cls.blank(home, root, watch=watch)
        script = next((name for name in USUAL_SCRIPTS if (root / name).is_file()), None)
        draft.form.set_texts({"name": fit_name(root.name), "source": ".", **({"entrypoint": script} if script else {})})
        if not script:
            draft.form.set_field(next(field for field in job_fields() if field.name == "trainer"), "true")
        draft.original = draft.form.copy()
        return draft

    @classmethod
    def of_file(cls, name: str, home: Path, root: Path, *, watch: bool = True) -> Draft:
        """Return the draft of a job file below the root; raises BadRequest, BadJob."""
        path = resolve_below(root, name)
        if not path.is_file():  # opening a pipe would block
            raise BadRequest(f"there is no job file {name} below {root}", "create one with cloudtrain init")
        draft = cls(Form.load(path), home, root, watch=watch)
        draft.name = os.path.relpath(path.with_suffix(".yaml") if path.suffix == ".json" else path, root.resolve())
        return draft

    @classmethod
    def of_run(cls, run_id: str, home: Path, root: Path, *, watch: bool = True) -> Draft:
        """Return the draft of a stored run's job, without default and configured values where the job stays equal.

        Raises UnknownRun.
        """
        from cloudtrain.job.job import Job
        from cloudtrain.runs.run import Run

        run = Run.find(run_id, home)
        plan = run.attempts[0].plan
        data = Job.from_dict(_requested_job(plan, home)).to_dict()
        full_draft = cls(Form.of_job(data, root), home, root, parent=run.run_id, watch=watch)
        full_job = full_draft._resolve()
        lean_data = lean(data)
        without_options = {key: value for key, value in lean_data.items() if key != "options"}
        for form in (Form.of_job(without_options, root), Form.of_job(lean_data, root)):
            draft = cls(form, home, root, parent=run.run_id, watch=watch)
            if full_job is not None and draft._resolve() == full_job:
                return draft
        return full_draft

    def snapshot(self) -> Draft:
        """Return a copy of the draft, for another thread to read while this one is edited."""
        from copy import copy

        snapshot = copy(self)
        snapshot.form = self.form.copy()
        return snapshot

    # -- problems and plan ---------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        """Return every problem of the values; the source is not read."""
        try:
            document, _ = self.form.document()
        except BadJob as error:
            return list(error.problems)
        problems = []
        try:
            resolved = self._submitter().resolve((document, self.form.folder))
            job = resolved.job
            layout = job.parallelism.model_dump(exclude_none=True)
            problems = find_refusals(job, layout, job.world_size, job.num_nodes) if job.trainer else []
        except CloudtrainError as error:
            problems = _problems(error)
        return [_with_path(problem, document) for problem in problems]

    def list_source(self) -> Listing:
        """List the files that the source would send; fetches a git address. Raises BadJob where its fields are wrong."""
        from cloudtrain.job.job import Job
        from cloudtrain.runs.planning.plan import Resolved

        if bundle := self._parent_bundle():
            return Listing(bundle.source, bundle.files, bundle.size_bytes, _describe_commit(bundle))
        table = Table((key, node) for key, node in self.form.table if key in _SOURCE_KEYS)
        document, folder = Form(table, self.form.folder).document()
        job = Job.from_document(document, folder)
        try:
            bundle = self._submitter().package(Resolved(job, "", ""))
        except BadSource as error:
            files: Sequence[File] = ()
            with suppress(CloudtrainError):  # the whole list helps to fix what was refused
                files = list_files(Path(job.source)) if "://" not in job.source else ()
            return Listing(job.source, files, problem=Problem(error.message, "source", error.hint))
        return Listing(bundle.source, bundle.files, bundle.size_bytes, _describe_commit(bundle))

    def review(self) -> Review:
        """Return the job file with its plan or its problems. Packages the source, sends nothing."""
        text = self.form.text()
        if problems := self.problems():
            return Review(text, problems)
        submitter = self._submitter()
        try:
            plan, bundle = submitter.plan_job(self.form.document(), bundle=self._parent_bundle())
            return Review(text, (), plan, bundle)
        except CloudtrainError as error:
            return Review(text, _problems(error))

    def changes(self) -> list[tuple[str, str, str]]:
        """Return (path, old text, new text) of every value that differs from the draft as it was opened."""
        old, new = dict(_leaves(self.original.table)), dict(_leaves(self.form.table))
        if self.parent and not self.same_source and old.get("source") == new.get("source"):
            old["source"] = f"as {self.parent} packaged it"
        return [
            (path, old.get(path, ""), new.get(path, "")) for path in {**old, **new} if old.get(path) != new.get(path)
        ]

    # -- submit and save ----------------------------------------------------------------------------------------------

    def submit(self, review: Review) -> Run:
        """Send the reviewed plan, once even when called again; blocks until it is accepted.

        Raises BadRequest, BackendError, StoreError.
        """
        if review.plan is None or review.bundle is None:
            raise BadRequest("the job has problems, so it cannot be submitted", "the Review step lists them")
        with self._submit_lock:
            name = review.plan.run_id
            if name not in self._submitted:
                submitter = self._submitter()
                submitter.resolve(self.form.document())  # sets the location of the configuration
                run = submitter.send(review.plan, review.bundle, parent=self.parent or None)
                run.acknowledge()
                self._submitted[name] = run
            return self._submitted[name]

    @property
    def is_call(self) -> bool:
        """Whether the job is the call of a Python function."""
        return self.form.get(("entrypoint",)) == CALL

    def roles(self) -> list[tuple[str, str, str]]:
        """Return name, nodes and program of each role as they are written; what belongs to the main one may be at the top."""
        try:
            job = self.form.document()[0].value or {}
        except BadJob:
            return []
        roles, main, found = job.get("roles"), main_role(job.get("roles")), []
        for name, role in roles.items() if isinstance(roles, Mapping) else ():
            own = {**(job if name == main else {}), **(role if isinstance(role, Mapping) else {})}
            nodes = role.get("num_nodes", 1) if isinstance(role, Mapping) else 1
            found.append(
                (
                    f"{name} (main)" if name == main else name,
                    str(nodes),
                    str(own.get("entrypoint") or own.get("run") or ""),
                )
            )
        return found

    def hyperparameters(self) -> list[str]:
        """Return the names of the job's hyperparameters."""
        try:
            document, _ = self.form.document()
        except BadJob:
            return []
        return list(document.value.get("hyperparameters") or {})

    def start_sweep(self, text: str) -> str:
        """Start a sweep of the job from the text of a sweep file, and return its id; blocking.

        Raises BadJob, BadRequest, BackendError.
        """
        from cloudtrain.job.job import read
        from cloudtrain.sweeps.sweep import begin

        if problems := self.problems():
            raise BadRequest("the job has problems", "; ".join(problem.message for problem in problems))
        section, _ = read(f"{text}\n")  # with a line's end it is not a file name
        document, folder = self.form.document()
        return begin(section.value, folder, job=document.value, home=self.home).sweep_id

    def save(self, name: str, *, overwrite: bool = False) -> Path:
        """Write the job file below the root, with relative paths from its folder. Raises BadRequest where the file exists."""
        path = resolve_below(self.root, name)
        if path.suffix not in SUFFIXES[:2]:
            raise BadRequest(f"{name} is not a name for a job file", "the name must end in .yaml")
        if not path.parent.is_dir():
            raise BadRequest(f"there is no folder {path.parent}", "create it first")
        if path.is_dir() or (os.path.lexists(path) and not overwrite):
            raise BadRequest(f"{name} already exists", "choose another name, or overwrite it")
        form = self.form.moved_to(path.parent)
        _write(path, form.text(), overwrite=overwrite)
        self.name = os.path.relpath(path, self.root.resolve())
        return path

    def _submitter(self) -> Submitter:
        from cloudtrain.runs.submit import Submitter

        return Submitter(home=self.home, watch=self.watch)

    def _resolve(self) -> Any:
        try:
            resolved = self._submitter().resolve(self.form.document())
        except CloudtrainError:
            return None
        return resolved.job.to_dict(), resolved.target, resolved.backend

    def _parent_bundle(self) -> Bundle | None:
        """Return the parent run's source if the draft reuses it; raises BackendError when it was deleted."""
        if not (self.parent and self.same_source):
            return None
        from cloudtrain.runs.run import Run

        return attempts.stored_bundle(Run.find(self.parent, self.home).attempts[0].plan, self.home)


def resolve_below(root: Path, name: str) -> Path:
    """Return the path of a job file below the root: not hidden, not through a link that leads out. Raises BadRequest."""
    if not name.strip() or "\0" in name or len(name) > 1000:
        raise BadRequest("this is not a file name", "give the path of a job file, such as job.yaml")
    resolved_root = root.resolve()
    path = (resolved_root / name).parent.resolve() / Path(name).name
    real = path.resolve()
    if resolved_root not in path.parents or resolved_root not in real.parents:
        raise BadRequest(
            f"{name} is outside {resolved_root}",
            "the console opens and writes job files only inside the folder that it was started in",
        )
    if any(part.startswith(".") for part in real.relative_to(resolved_root).parts):
        raise BadRequest(f"{name} is hidden", "choose a name that does not start with a dot")
    if path.suffix not in SUFFIXES:
        raise BadRequest(f"{name} is not a name for a job file", "the name must end in .yaml")
    return real


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file atomically; with `overwrite` it may replace another file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as stream:
            stream.write(text)
        if overwrite:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # fails if the file was created meanwhile
    except FileExistsError:
        raise BadRequest(f"{path.name} already exists", "choose another name, or overwrite it") from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}", "check the folder") from None
    finally:
        temporary.unlink(missing_ok=True)


def _problems(error: CloudtrainError) -> list[Problem]:
    if isinstance(error, BadJob):
        return list(error.problems)
    path = "source" if isinstance(error, BadSource) else ""
    path = "target" if isinstance(error, UnknownBackend | MissingExtra) else path
    return [Problem(error.message, path, error.hint)]


def _with_path(problem: Problem, document: Document) -> Problem:
    """Add the path to a problem that has only a line number (such as a duplicate key)."""
    if problem.path or problem.line is None:
        return problem
    lines = ((mark.line or 0, path) for path, mark in document.marks.items() if path)
    nearest = max((entry for entry in lines if entry[0] <= problem.line), default=None, key=lambda entry: entry[0])
    return Problem(problem.message, dotted(nearest[1]), problem.hint) if nearest else problem


def _requested_job(plan: Plan, home: Path) -> Mapping[str, Any]:
    """Return a plan's job as it was requested: without the labels and requirements that were added to it."""
    import getpass

    from cloudtrain.job.targets import HOME_LABEL, SUBMITTER_LABEL
    from cloudtrain.runs.planning.plan import label
    from cloudtrain.sweeps.send import TRIAL, TRIAL_LABELS

    commit = str(plan.bundle.get("commit") or "")[:12] + ("-dirty" if plan.bundle.get("dirty") else "")
    own = {"user": label(getpass.getuser()), "commit": commit}
    internal = {SUBMITTER_LABEL, HOME_LABEL, *(TRIAL_LABELS if TRIAL in plan.job.get("env", {}) else ())}
    labels = {
        name: text
        for name, text in plan.job.get("labels", {}).items()
        if own.get(name) != text and name not in internal
    }
    bundle = Bundle.stored(home / "bundles", str(plan.bundle["sha256"]))
    usual = "requirements.txt" if bundle and any(file.path == "requirements.txt" for file in bundle.files) else "none"
    environment = dict(plan.job.get("environment") or {})
    if bundle and environment.get("requirements") == usual:
        del environment["requirements"]
    return {**plan.job, "labels": labels, "environment": environment}


def _describe_commit(bundle: Bundle) -> str:
    return (bundle.commit or "")[:12] + (" with changes" if bundle.commit and bundle.dirty else "")


def _leaves(table: Table, prefix: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    from cloudtrain.console import jobtext

    leaves = []
    for key, node in table:
        path = (*prefix, key)
        leaves += (
            _leaves(node, path) if isinstance(node, Table) and node else [(dotted(path), jobtext.format_node(node))]
        )
    return leaves
