"""Old import paths: a module that has moved is still found under its old name, with a DeprecationWarning.

`cloudtrain/__init__.py` asks `find_spec` for names that nothing else finds; a package that took an old module's name asks
`member` for what that module had. `python -m cloudtrain.watch` works as well: watchers were started so.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

# package: its modules that were elsewhere, as new<old; `new` alone stood at the top of cloudtrain
_MODULES = """
: events<state events<usage
backends: api<backend aws gcs<bucket google<googleapi images machines manifest output_files<outputfiles registry s3<s3files
backends.attached: run<sharedrun
backends.kubernetes: client<kubeapi fetch_pod<requests.podfetch jobs<kubejobs kubeconfig log_merge<podlog
backends.kubernetes: logs<kubelogs options<kubernetesoptions init_container<requests.podstart request<requests.kubernetes
backends.kubernetes: rules<requests.kubernetesrules status<kubestatus store<kubestore volumes<kubeclaims
backends.local: bytecode
backends.sagemaker: docker<engine doctor<awsaccount ecr
backends.sagemaker: huggingface_estimator<huggingfaceestimator images<requests.huggingfaceimages
backends.sagemaker: limits<requests.sagemakerlimits local<backends.sagemaker_local
backends.sagemaker: local_job<localmode local_request<requests.sagemakerlocal local_s3<localstore logs<cloudwatch
backends.sagemaker: options<sagemakeroptions request<requests.sagemaker status<trainingjobs toolkit<requests.toolkit
backends.slurm: client<batch options<slurmoptions request<requests.slurm status<jobfolder
backends.ssh: doctor<inspection options<sshoptions
backends.vertex: bootstrap<requests.bootstrap images<googleimages jobs<customjobs local<backends.vertex_local
backends.vertex: logs<joblog options<vertexoptions request<requests.vertex
cli.view: chart<cli.chart columns<cli.columns failures<cli.failures follow<cli.follow jobs<cli.jobs live<cli.live
cli.view: log<cli.log options<cli.options provenance<cli.provenance runs<cli.runs summary<cli.summary
cli.view: terminal<cli.terminal timeline<cli.timeline why<cli.why
console: lists<console.drawn polling<console.keeping routes<console.pages security<console.gate shell<console.frame
console: widgets<console.parts
console.pages: compare<console.compare newjob<console.newjob newplace<console.newplace newreview<console.newreview
console.pages: newsource<console.newsource origin<console.origin overview<console.overview results<console.results
console.pages: run<console.run runlog<console.runlog runs<console.runs
diagnosis: certainty<verdictproof patterns<verdictrules patterns<verdictsentences patterns<verdictsigns
diagnosis: ranks<verdictranks tail tracebacks verdict
history: curves database event_files<foreign migrations records store
job: arguments configfile document fields<spec load<jobfile problems rules<conflicts sections targets<config
job: units<quantities yaml<yaml12
nodes: agent files<nodefiles paths<places process rpc ssh<remote supervisor<supervision transfer
report: compare<comparison notebook packages<installed plots
runs: attach<attached attempts keys notify plan<planner resume_check<resuming retry run send submit<submitter watch
runs: watcher<spawn
simulators: gcs<simulators.storage http<simulators.server
simulators.kubernetes: job_controller<simulators.jobs kubelet<simulators.pods objects<simulators.kubeobjects
simulators.kubernetes: pod_view<simulators.podview
simulators.sagemaker: training_job<simulators.trainingjob
simulators.vertex: jobs<simulators.customjobs lifecycle<simulators.life logs<simulators.entries
source: archive atomic<writing bundle clone<checkout digests<survey digests<statcache
source: git ignore limits<sizes provenance secrets<guard
"""
# package, the module that has what the module of that name had: its names
_MEMBERS = """
backends.kubernetes backends.kubernetes.backend: CLAIMS KubernetesBackend NEEDED POLL_S
backends.local backends.local.backend: JOIN_S LocalBackend
backends.sagemaker backends.sagemaker.backend: DRAIN_S LATE_S LOOK_S SagemakerBackend estimator
backends.slurm backends.slurm.backend: FOLLOW_S LATE_S SlurmBackend
backends.ssh backends.ssh.backend: CUT_OFF_S DIRECTORY LEASE_S LOST_AFTER_S START_S SshBackend TAIL_S
backends.vertex backends.vertex.backend: LOOK_S POLL_S SIMULATED_S VertexBackend
diagnosis diagnosis.record: KIND NODE judged kept shown
history history.queries: History
job job.job: Checkpoint Environment Input Job Limits NAME Parallelism Resources Retry SHARED_TRAINER fit_name schema
nodes nodes.directory: ASK_S CHUNK Look TAIL_S begun given_secrets left merge merged node_status read_status reap
nodes nodes.directory: start status_of stop supervised tail
report report.page: LINES write
simulators.kubernetes simulators.kubernetes.server: Cluster GROUPS Object discovery
simulators.sagemaker simulators.sagemaker.server: ACCOUNT Fault KEYS REGION ROLE Simulator main
simulators.vertex simulators.vertex.server: BUCKET IDLE_S PROJECT REGION START_S Simulator address main opened
source source.files: File IGNORE_FILE RESERVED SHOWN Source Verdict list_files refusal shown why
training training.distributed: DistributedTraining
"""
# old=new of single names that went elsewhere than their module
_SYMBOLS = """
backends.kubernetes.CLAIMS=backends.kubernetes.doctor.VOLUME_PERMISSIONS
backends.kubernetes.NEEDED=backends.kubernetes.doctor.REQUIRED_PERMISSIONS
requests.kubernetes.applicable=backends.kubernetes.request.kubectl_manifests
attached.refresh=runs.attached_history.refresh
backend.LogLine=events.LogLine backends.ssh.CUT_OFF_S=backends.ssh.status.CUT_OFF_S
config.targets=job.targets.named_targets images.exact=backends.images.pinned_image
events.MAX_ROW=metrics.dicts.MAX_ROW
diagnosis.judged=diagnosis.record.judge_attempt diagnosis.kept=diagnosis.record.load_verdict
diagnosis.shown=diagnosis.record.clean_line events.MetricParser=metrics.parser.MetricParser nodes.ASK_S=nodes.logs.ASK_S
nodes.CHUNK=nodes.logs.CHUNK_BYTES nodes.Look=nodes.logs.ReadPieces nodes.TAIL_S=nodes.logs.TAIL_S
nodes.begun=nodes.supervisor.has_begun nodes.given_secrets=backends.manifest.env_secrets
nodes.left=nodes.supervisor.has_leftovers nodes.merge=nodes.directory.merge_statuses nodes.merged=nodes.logs.merge
nodes.reap=nodes.supervisor.kill_leftovers nodes.status_of=nodes.directory.to_status
nodes.supervised=nodes.supervisor.is_supervised nodes.stop=nodes.supervisor.stop
nodes.read_status=nodes.supervisor.read_status nodes.tail=nodes.logs.tail
notebook.Runs=runs.listing.Runs notebook.runs=runs.listing.runs
report.page=report.page.render sharedrun.SharedAttempt=backends.plan.AttachedAttempt
sharedrun.SharedBackend=backends.attached.backend.AttachedBackend sharedrun.SharedRun=backends.attached.run.AttachedRun
simulators.vertex.address=simulators.vertex.server.find_url
simulators.vertex.opened=simulators.vertex.server.ensure_started simulators.life.Pace=simulators.vertex.lifecycle.Behavior
simulators.trainingjob.Habits=simulators.sagemaker.host.Behavior
spawn.watcher=runs.watcher.start usage.read=events.read_usage verdict.judge=diagnosis.judge.judge
"""
_GONE = "cloudtrain.requests"  # a package that is no more; its modules are listed


@cache
def _modules() -> dict[str, str]:
    new_names = {}
    for line in _MODULES.split("\n"):
        package, _, names = line.partition(":")
        for name in names.split():
            new, _, old = name.partition("<")
            new_names[f"cloudtrain.{old or new}"] = ".".join(filter(None, ("cloudtrain", package, new)))
    return new_names


@cache
def _symbols() -> dict[str, str]:
    return {f"cloudtrain.{old}": f"cloudtrain.{new}" for old, new in (pair.split("=") for pair in _SYMBOLS.split())}


@cache
def _members() -> dict[str, tuple[str, set[str]]]:
    members: dict[str, tuple[str, set[str]]] = {}
    for line in _MEMBERS.strip().split("\n"):
        head, _, names = line.partition(":")
        package, main = head.split()
        members.setdefault(f"cloudtrain.{package}", (f"cloudtrain.{main}", set()))[1].update(names.split())
    return members


def find_spec(name: str) -> ModuleSpec | None:
    """Return how an old module's name is imported, or None where it is none."""
    if name == _GONE:
        return ModuleSpec(name, _Old(""), is_package=True)  # type: ignore[arg-type]
    new = _modules().get(name)
    return ModuleSpec(name, _Old(new), origin=new) if new else None  # type: ignore[arg-type]


def member(package: str, name: str) -> Any:
    """Return what an old module, whose name is a package's now, had under a name."""
    main, names = _members().get(package, ("", set()))
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    new = _symbols().get(f"{package}.{name}", f"{main}.{name}")
    _warn(f"{package}.{name}", new, 4)
    module, _, attribute = new.rpartition(".")
    return getattr(import_module(module), attribute)


def _warn(old: str, new: str, level: int) -> None:
    warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=level)


class _Old:
    """Loads an old name as the module that it is now; as a module of its own where some of its names went elsewhere."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if not self.new:
            return
        name = module.__name__
        _warn(name, self.new, 3)
        target = import_module(self.new)
        apart = {old.rpartition(".")[2]: new for old, new in _symbols().items() if old.rpartition(".")[0] == name}
        if not apart:
            sys.modules[name] = target
            return

        def find_attribute(attribute: str) -> Any:
            if attribute not in apart:
                return getattr(target, attribute)
            home, _, new = apart[attribute].rpartition(".")
            return getattr(import_module(home), new)

        module.__dict__["__getattr__"] = find_attribute
        module.__doc__ = target.__doc__

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module, for `python -m`."""
        from importlib.util import find_spec as find

        spec = find(self.new)
        return spec.loader.get_code(self.new) if spec and spec.loader else None  # type: ignore[attr-defined]
