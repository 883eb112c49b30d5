"""One job file; every place where a model can be trained."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which costs several times what this file does
if TYPE_CHECKING:
    from cloudtrain.__about__ import __version__
    from cloudtrain.errors import CloudtrainError, RunFailed
    from cloudtrain.events import State, Status
    from cloudtrain.functions.function import function
    from cloudtrain.job.job import Job
    from cloudtrain.runs.attach import attach
    from cloudtrain.runs.listing import runs
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.submit import Submitter, submit
    from cloudtrain.sweeps.sweep import Sweep
    from cloudtrain.training.distributed import DistributedTraining

# public name -> its module; resolved at first use (PEP 562), so that `import cloudtrain` costs next to nothing
_HOME = {
    "__version__": "__about__",
    "CloudtrainError": "errors",
    "DistributedTraining": "training.distributed",
    "Job": "job.job",
    "Run": "runs.run",
    "RunFailed": "errors",
    "State": "events",
    "Status": "events",
    "Submitter": "runs.submit",
    "Sweep": "sweeps.sweep",
    "attach": "runs.attach",
    "function": "functions.function",
    "runs": "runs",
    "submit": "runs.submit",
}
__all__ = [
    "CloudtrainError",
    "DistributedTraining",
    "Job",
    "Run",
    "RunFailed",
    "State",
    "Status",
    "Submitter",
    "Sweep",
    "__version__",
    "attach",
    "function",
    "runs",
    "submit",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{_HOME[name]}")
    value: object = module if _HOME[name] == name else getattr(module, name)  # `runs` is a package, and can be called
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
