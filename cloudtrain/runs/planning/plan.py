"""Plan a run: resolve the job, package its source, make its backend's request. Stores no intent and sends nothing."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Paths, Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job import homes, roles, rules, targets
from cloudtrain.policy import apply
from cloudtrain.runs.planning import bad_nodes, candidates, cap, keys, upstream
from cloudtrain.runs.planning.checks.job import Case
from cloudtrain.runs.planning.checks.source import fit_script
from cloudtrain.runs.planning.checks.table import CHECKS
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.files import RESERVED
from cloudtrain.source.texts import Texts

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store
    from cloudtrain.job.document import Document
    from cloudtrain.job.job import Job


class Planner:
    """Packages a job and makes its plan.

    `target` is a backend or a target of cloudtrain.toml, and wins over the job's own; `options` are that backend's and
    win over all others. `home` is where bundles are kept. `force` plans what does not fit on its GPUs, too.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        home: Path | None = None,
        force: bool = False,
        clock: Clock = SYSTEM,
        **options: Any,
    ) -> None:
        self.target, self.force, self.clock = target, force, clock
        self.home = home or targets.home()
        self.overrides = options
        self.earlier_policies: Sequence[Mapping[str, Any]] = ()  # of an older plan of the run
        self._folder = Path.cwd()  # of the job: where its cloudtrain.toml is looked for

    @cached_property
    def store(self) -> Store:
        """The history of the home, of a thread of its own."""
        from cloudtrain.history.store import Store

        return Store(self.home, self.clock)

    @property
    def config_files(self) -> list[Path]:
        """The configuration files of the last job, the weakest first."""
        return targets.config_files(self._folder)

    def plan(
        self, job: Job | Mapping[str, Any] | str | os.PathLike[str], *, sets: Sequence[str] = (), key: str | None = None
    ) -> Plan:
        """Return what `submit` would send. It packages the source, but sends nothing and stores no run.

        Args:
            job: A Job, a dictionary of its keys, or the path of a job file.
            sets: Changes of the job, such as `num_nodes=2`.
            key: Plan the run that `submit(key=...)` would start.

        Returns:
            The plan: `plan.request` is the request to the platform, `plan.notes` are its notes.

        Raises:
            BadRequest: The job is wrong; the error lists all problems.
        """
        return self.plan_job(job, sets, key)[0]

    def plan_job(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
        sets: Sequence[str] = (),
        key: str | None = None,
        bundle: Bundle | None = None,
        extra: Mapping[str, Path] | None = None,
    ) -> tuple[Plan, Bundle]:
        """Return the plan of a job, or of the first possible one of its candidates, and its bundle with `extra` files."""
        packed = [bundle] if bundle else []  # once for all candidates: their source is the same

        def make(choice: targets.Choice) -> Plan:
            resolved = self.resolve(job, sets, choice)
            if not packed:
                packed.append(self.package(resolved, extra))
            return self.plan_of(resolved, packed[0], key)

        found = targets.choices(job, sets, target=self.target)
        if len(found) == 1:
            return make(found[0]), packed[0]
        return candidates.choose(found, make), packed[0]

    def resolve(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
        sets: Sequence[str] = (),
        choice: targets.Choice | None = None,
    ) -> Resolved:
        """Return the job with its target's options merged in and validated; raises BadJob with all problems.

        A document comes with the folder in which it would be a file. Of several candidates it is `choice`, or the first.
        """
        if isinstance(job, tuple):
            self._folder = job[1]
        else:
            self._folder = Path(job).absolute().parent if isinstance(job, str | os.PathLike) else Path.cwd()

        def read(over: Sequence[Document] = ()) -> targets.Resolved:
            known = registry.Names()
            return targets.resolve(job, sets, target=self.target, backends=known, choice=choice, over=over)

        resolution = read()
        kind = registry.backend_class(resolution.backend)
        governed = apply.govern(
            resolution,
            self._folder,
            self.home,
            overrides=self.overrides,
            earlier=self.earlier_policies,
            again=read,
        )
        options = governed.options
        found = governed.job
        if found.after:
            found = upstream.resolve(found, self.home)
        if any(item.run for item in found.inputs.values()):
            found = upstream.locate(found, resolution.backend, options, self.home)
        problems = [
            *_unsupported(found, kind),
            *rules.find_keys(found),
            *find_invalid(options, kind, resolution.backend, resolution.target),
        ]
        if problems:
            raise BadJob(found.located(problems))
        own = {resolution.backend: options}  # the first one; the others are for a move to their platforms
        others = {name: given for name, given in found.options.items() if name not in own}
        ready = found.model_copy(update={"options": own | others, "target": resolution.target})
        return Resolved(
            ready, resolution.target, resolution.backend, governed, resolution.target_prices, resolution.document.notes
        )

    def package(self, resolved: Resolved, extra: Mapping[str, Path] | None = None) -> Bundle:
        """Return the bundle of a job's source and of `extra` files, made or found below the home."""
        job = resolved.job
        scripts = [_script(each) for each in (job.entrypoint, *(role.entrypoint for role in job.roles.values()))]
        own = [role.requirements for role in job.roles.values() if role.requirements != "none"]
        names = (*scripts, *own, job.environment.requirements, job.parallelism.accelerate_config)
        needed = [name for name in names if name]
        folder = Path(job.source)
        with suppress(OSError):  # a home that only can be read
            homes.make_home(self.home)
        if _remote(job):
            from cloudtrain.source import clone

            folder, _ = clone.fetch_git(job.source, self.home / "sources")
        into = self.home / "bundles"
        bundle = Bundle.make(folder, into, extra, must_have=needed, trainer=job.runs_trainer, **job.exceptions)
        if bundle.commit and bundle.dirty:
            from cloudtrain.source import provenance

            sources = [source[4:] for secret in job.secrets.values() for source in secret if source.startswith("env:")]
            provenance.keep(bundle, [os.environ[name] for name in sources if name in os.environ])
        return bundle

    def plan_stored(
        self, resolved: Resolved, bundle: Bundle, key: str | None = None, earlier: Sequence[AttemptRecord] = ()
    ) -> Plan:
        """Return what `plan_of` does; checks read the files of the bundle, for those of its source may have changed."""
        with tempfile.TemporaryDirectory(prefix=".plan-", dir=self.home) as folder:
            bundle.extract(Path(folder, "source"))
            if resolved.job.runs_trainer and not Path(folder, "source", RESERVED, "train.py").exists():
                raise BadRequest(
                    "the run's stored source has no shared trainer, which the changed job needs", "submit the job file"
                )
            return self.plan_of(resolved, replace(bundle, source=f"{folder}/source"), key, earlier)

    def plan_of(
        self, resolved: Resolved, bundle: Bundle, key: str | None = None, earlier: Sequence[AttemptRecord] = ()
    ) -> Plan:
        """Return the plan of a job over a bundle: of a run with a new id or that of `key`, or of the attempt after `earlier`."""
        names = [file.path for file in bundle.files]
        source = Texts(Path(bundle.source), names, resolved.job.entrypoint)
        bound, found = fit_script(resolved.job.bind(names), source, resolved.backend)
        found += resolved.notes
        labels = self._labels(bound, bundle)
        if key is not None:
            labels |= keys.labels(bound.to_dict(), bundle.source_sha256, resolved.backend, resolved.target)
        changes: dict[str, Any] = {"labels": labels}
        if _remote(resolved.job) and bundle.commit:
            from cloudtrain.source import clone

            changes["source"] = clone.pin(resolved.job.source, bundle.commit)
        job = bound.model_copy(update=changes)
        backend = self.backend(resolved)
        if job.parallelism.strategy == "auto":
            from cloudtrain.runs.planning import fit_check

            job, chosen = fit_check.freeze(job, backend, bundle)
            found += chosen
        run, number = (earlier[-1].run_id, earlier[-1].number + 1) if earlier else (run_id(job.name, key), 1)
        plan = cap.plan_attempt(backend, job, bundle, run, number, earlier, self.home)
        if plan.price and plan.price["source"] == "resources.usd_per_hour" and resolved.target_prices:
            stated = {key: value for key, value in plan.price.items() if key != "known_usd_per_hour"}
            plan = replace(plan, price={**stated, "source": f"usd_per_hour of the target {resolved.target}"})
        problems: list[Problem] = []
        if job.trainer or job.fit.model:
            from cloudtrain.runs.planning import fit_check

            plan, problems = fit_check.forecast(job, plan, self.force, backend, source)
        governed = resolved.governed
        case = Case(job, plan, source, backend, (*found, *problems), governed.notes if governed else ())
        plan = replace(plan, target=resolved.target, notes=notes_of(case))
        if number == 1 and (self.home / "history.sqlite3").exists():  # for later ones see retry.plan_after
            plan = bad_nodes.avoid(self.store, backend, plan)
        return governed.check(plan, backend) if governed else plan

    def _labels(self, job: Job, bundle: Bundle) -> dict[str, str]:
        """Return the labels of a run: the job's, and who submits what, and from where."""
        me = label(getpass.getuser())
        labels = {"user": me, **job.labels}
        labels.pop(targets.SUBMITTER_LABEL, None)
        if labels["user"] != me:
            labels[targets.SUBMITTER_LABEL] = me
        if home_id := homes.home_id(self.home):
            labels[targets.HOME_LABEL] = home_id
        if bundle.commit:
            labels["commit"] = bundle.commit[:12] + ("-dirty" if bundle.dirty else "")
        return labels

    def backend(self, resolved: Resolved) -> Backend:
        return registry.create(resolved.backend, resolved.job.options.get(resolved.backend, {}), self.home, self.clock)


@dataclass
class Resolved:
    """A validated job together with the target and backend that were chosen for it."""

    job: Job
    target: str
    backend: str
    governed: apply.Governed | None = None
    target_prices: bool = False
    notes: Sequence[str] = ()


def notes_of(case: Case) -> tuple[str, ...]:
    """Return the notes of a plan, the most important first; raises BadJob with all problems."""
    found = [each for check in CHECKS for each in check(case)]
    if problems := [each for each in found if isinstance(each, Problem)]:
        raise BadJob(case.job.located(problems))
    return tuple(each for each in found if isinstance(each, str))


def run_id(name: str, key: str | None = None) -> str:
    """Return a new run id, or the one that a key always gives."""
    if key is not None:
        return f"{name}-k{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    stamp = SYSTEM.utc().strftime("%y%m%d-%H%M%S")
    return f"{name}-{stamp}-{''.join(secrets.choice(alphabet) for _ in range(4))}"


def _script(entrypoint: str | list[str] | None) -> str | None:
    """Return the file that an entrypoint needs in the source, where it names one."""
    return entrypoint if isinstance(entrypoint, str) and not entrypoint.startswith("-m") else None


def _remote(job: Job) -> bool:
    return job.source.startswith("git+")


def label(text: str) -> str:
    """Return a text as every platform takes it for a label's value."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower())[:63].strip("-") or "unknown"


def _unsupported(job: Job, kind: type[Backend]) -> list[Problem]:
    """Return what the job wants and the backend cannot do."""
    problems = [
        Problem(
            f"the backend {kind.name} does not offer {rules.describe_key(key)}",
            _path(job, key),
            _instead(key, kind),
        )
        for key in rules.keys_in_use(job)
        if key not in kind.traits.keys
    ]
    problems += [
        Problem(f"the backend {kind.name} does not offer {rules.describe_key(key)}", f"roles.{name}.{key}")
        for name in (roles.services(job) if job.roles else ())
        if job.roles[name].resources
        for key in rules.keys_in_use(roles.program(job, name))
        if key.startswith("resources.") and key not in kind.traits.keys
    ]
    if kind.traits.paths is Paths.NONE:
        message = f"the backend {kind.name} does not offer inputs and output that are paths of this machine"
        places = {f"inputs.{name}": item.uri for name, item in job.inputs.items()} | {"output": job.output or "s3://"}
        problems += [
            Problem(message, path) for path, uri in places.items() if "://" not in uri or uri.startswith("file://")
        ]
    return problems


def _path(job: Job, key: str) -> str:
    """Return where a job says a platform key: of `roles` at the first service that has its own value."""
    section, _, name = key.partition(".")
    if section == "roles":
        own = (
            each
            for each in roles.services(job)
            if getattr(job.roles[each], name) not in (None, getattr(job, name, None))
        )
        return f"roles.{next(own, job.main_role)}.{name}"
    return section if section == "secrets" else key


def _instead(key: str, kind: type[Backend]) -> str:
    """Return what to write where a backend does not take a key; "" where there is no replacement."""
    if key == "secrets.k8s":
        return "name another source, or a second one for this backend: [k8s:SECRET/KEY, aws-secretsmanager:NAME]"
    if key == "secrets.env":
        if "secrets.k8s" in kind.traits.keys:
            return "use a secret of the cluster, k8s:SECRET/KEY, or aws-secretsmanager:NAME or gcp-secretmanager:NAME"
        if "secrets.file" in kind.traits.keys:
            return "put it into a file with mode 600 on the node and write file:PATH"
        return "use a secret store: aws-secretsmanager:NAME, gcp-secretmanager:NAME or azure-keyvault:VAULT/KEY"
    if key == "roles.colocate":
        return "remove it: the role then has nodes of its own; or choose another target (-t)"
    if key.startswith("roles."):
        name = key.removeprefix("roles.")
        return f"write one {name} for all roles at the top of the job, or choose another target (-t)"
    if key == "resources.use_spot":
        return "add --set resources.use_spot=false, or choose another target (-t)"
    return ""


def find_invalid(options: Mapping[str, Any], kind: type[Backend], name: str, target: str) -> list[Problem]:
    """Return what the backend's own model finds wrong with its options."""
    from pydantic import ValidationError

    from cloudtrain.job import problems

    model = kind.options()
    try:
        model.model_validate(options)
    except ValidationError as error:
        explained = problems.explain(error, model, prefix=("options", name))
        missing = "is missing"  # pydantic's word, as problems.explain puts it
        return [
            replace(problem, hint=_where(problem.path, name, target)) if problem.message == missing else problem
            for problem in explained
        ]
    return []


def _where(path: str, name: str, target: str) -> str:
    """Return where an option is written: once for all jobs, or for this one."""
    option = path.removeprefix(f"options.{name}.")
    table = f"[targets.{target}]" + (f' and backend = "{name}"' if target == name else "")
    return f"set {option} = ... in section {table} of cloudtrain.toml, or pass --set {path}=..."
