"""Old import paths still work, and say where their module is now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.conftest import WAIT_S

# documented for authors of backends, or used by the plugin of the tests; and one of each kind that was not
PATHS = {
    "cloudtrain.backend.Backend": "cloudtrain.backends.api.Backend",
    "cloudtrain.backend.LogLine": "cloudtrain.events.LogLine",
    "cloudtrain.backend.Plan": "cloudtrain.backends.api.Plan",
    "cloudtrain.bundle.Bundle": "cloudtrain.source.bundle.Bundle",
    "cloudtrain.images.exact": "cloudtrain.backends.images.pinned_image",
    "cloudtrain.job.Job": "cloudtrain.job.job.Job",
    "cloudtrain.manifest.Manifest": "cloudtrain.backends.manifest.Manifest",
    "cloudtrain.nodes.start": "cloudtrain.nodes.directory.start",
    "cloudtrain.nodes.stop": "cloudtrain.nodes.supervisor.stop",
    "cloudtrain.nodes.tail": "cloudtrain.nodes.logs.tail",
    "cloudtrain.provenance.of": "cloudtrain.source.provenance.of",
    "cloudtrain.backends.sagemaker.estimator": "cloudtrain.backends.sagemaker.backend.estimator",
    "cloudtrain.backends.sagemaker_local.SagemakerLocalBackend": "cloudtrain.backends.sagemaker.local.SagemakerLocalBackend",
    "cloudtrain.requests.kubernetes.applicable": "cloudtrain.backends.kubernetes.request.kubectl_manifests",
    "cloudtrain.simulators.kubernetes.Cluster": "cloudtrain.simulators.kubernetes.server.Cluster",
    "cloudtrain.simulators.server.Server": "cloudtrain.simulators.http.Server",
    "cloudtrain.run.Run": "cloudtrain.runs.run.Run",
    "cloudtrain.state.State": "cloudtrain.events.State",
    "cloudtrain.store.Store": "cloudtrain.history.store.Store",
    "cloudtrain.usage.read": "cloudtrain.events.read_usage",
}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("old", PATHS)
def test_an_old_path_is_the_same_thing(old):
    module, _, name = old.rpartition(".")
    done = python(
        "-c",
        "import warnings; warnings.simplefilter('always')\n"
        f"from {module} import {name} as old\n"
        f"from {PATHS[old].rpartition('.')[0]} import {PATHS[old].rpartition('.')[2]} as new\n"
        "assert old is new",
    )
    assert done.returncode == 0, done.stderr
    assert "DeprecationWarning: cloudtrain." in done.stderr and "has moved to cloudtrain." in done.stderr
    assert "<string>:2" in done.stderr, "the warning points at the import"


def test_modules_of_a_package_that_took_an_old_name_cost_no_warning():
    names = ("job.units", "nodes.agent", "source.files", "report.page", "backends.sagemaker.images")
    code = "; ".join(f"from cloudtrain.{name.rpartition('.')[0]} import {name.rpartition('.')[2]}" for name in names)
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


def test_every_old_path_leads_somewhere():
    from cloudtrain import _moved

    code = "import warnings; warnings.simplefilter('ignore')\nfrom importlib import import_module\n"
    skip = ("cloudtrain.console.", "cloudtrain.cli.")  # need NiceGUI; commands
    olds = [old for old in _moved._modules() if not old.startswith(skip)]
    assert len(olds) > 80
    members = [(package, name) for package, (_, names) in _moved._members().items() for name in names]
    code += f"for old in {olds!r}: import_module(old)\n"
    code += f"for package, name in {members!r}: getattr(import_module(package), name)\n"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'cloudtrain\.no_such_module'"):
        import_module("cloudtrain.no_such_module")
    with pytest.raises(ImportError):
        exec("from cloudtrain.nodes import nothing")


def test_a_watcher_is_started_under_its_old_name():
    """As 53b05dd starts them: `python -m cloudtrain.watch RUN HOME`."""
    done = python("-m", "cloudtrain.watch")
    new = python("-m", "cloudtrain.runs.watch")
    assert done.returncode == new.returncode
    assert done.stderr.splitlines()[-1] == new.stderr.splitlines()[-1]


def test_nothing_is_read_for_names_that_are_where_they_were():
    done = python("-c", "import cloudtrain, sys; print('cloudtrain._moved' in sys.modules)")
    assert done.stdout.strip() == "False"
