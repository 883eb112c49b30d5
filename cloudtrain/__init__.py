"""One job file; every place where a model can be trained."""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, which costs several times what this file does
if TYPE_CHECKING:
    from cloudtrain.attached import attach
    from cloudtrain.errors import CloudtrainError, RunFailed
    from cloudtrain.job import Job
    from cloudtrain.notebook import runs
    from cloudtrain.run import Run
    from cloudtrain.state import State, Status
    from cloudtrain.submitter import Submitter, submit
    from cloudtrain.training import DistributedTraining

# public name -> its module; resolved at first use (PEP 562), so that `import cloudtrain` costs next to nothing
_HOME = {
    "CloudtrainError": "errors",
    "DistributedTraining": "training",
    "Job": "job",
    "Run": "run",
    "RunFailed": "errors",
    "State": "state",
    "Status": "state",
    "Submitter": "submitter",
    "attach": "attached",
    "runs": "notebook",
    "submit": "submitter",
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
    "__version__",
    "attach",
    "runs",
    "submit",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from cloudtrain.importing import Quickly

    with Quickly():
        value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
