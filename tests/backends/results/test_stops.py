"""A cancel on each target: a script behind any wrapper saves once, and what it saved comes home."""

from __future__ import annotations

import pytest

from cloudtrain.runs.submit import Submitter
from tests.backends.results.places import open_place
from tests.backends.results.test_results import PLACES
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, wait_for
from tests.entrypoints.launcher.test_grace import WRAPPERS, faults_below, table

TORCHRUN = '"$PYTHON" -m torch.distributed.run --nproc-per-node=1 --master-port=0 saver.py $NAME'
MORE = {"torchrun": TORCHRUN, "torchrun-shell": f"bash -c '{TORCHRUN}; touch $NAME.after'"}
FIRST = "import os, sys\nos.environ['PYTHON'] = sys.executable\nos.execvp('bash', ['bash', 'table.sh'])\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.docker if name == "sagemaker-local" else pytest.mark.long)
        for name in PLACES
    ],
)
def test_a_script_behind_any_wrapper_saves(name, tmp_path, home, request):
    """One rank for each wrapper; the helpers that stay do not hold the end for the grace."""
    wrappers = WRAPPERS | MORE
    source = tmp_path / "source"
    source.mkdir()
    files = table(wrappers) | {"first.py": FIRST}
    files["table.sh"] = files["table.sh"].partition("\n")[2]  # the interpreter is that of the target
    for file, text in files.items():
        (source / file).write_text(text)
    with open_place(name, request) as at:
        job = {"name": "stops", "source": str(source), "entrypoint": "first.py", "output": at.output}
        job |= {"processes_per_node": len(wrappers), "environment": {"requirements": "none"}}
        job["limits"] = {"grace": "20m"}
        run = Submitter(at.backend, home=home, watch=False, **at.options).submit(job)
        for wrapper in wrappers:
            wait_for(lambda end=f"{wrapper}.runs": any(path.endswith(end) for path in at.copies(run)), wrapper)
        run.cancel()
        assert run.wait(2 * WAIT_S).state.name == "CANCELLED"
        left = run.fetch(tmp_path / "fetched") / "outputs"
    assert faults_below(left, wrappers, ("after",)) == {}, [line.text for line in run.logs()]
