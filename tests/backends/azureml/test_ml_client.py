"""A client that is not ours on the simulated workspace: MLClient of azure-ai-ml 1.35.2, which Azure's own tools use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.azureml.backend import AzuremlBackend
from cloudtrain.job.job import Job
from cloudtrain.simulators.azureml.jobs import Behavior
from cloudtrain.simulators.azureml.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.lab.sdk import azure_interpreter, run


@pytest.mark.timeout(1200)
def test_azures_own_client_creates_reads_streams_cancels_lists_and_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = azure_interpreter()
    simulator = Simulator(tmp_path / "simulator", behavior=Behavior(page=1))
    for name, value in simulator.environ.items():
        monkeypatch.setenv(name, value)
    simulator.environments["1"] = {"properties": {"image": "any:1"}}
    source = tmp_path / "source"
    source.mkdir()
    (source / "script.py").write_text("print('hello')")
    keys = {"name": "a", "entrypoint": "script.py", "image": "any:1", "environment": {"requirements": "none"}}
    bundle, job = Bundle.make(source, tmp_path / "bundles"), Job.from_dict({**keys, "source": str(source)})
    backend = AzuremlBackend(simulator.options, tmp_path / "work")
    try:
        plan = backend.plan(job, bundle, "ours")
        backend.submit(plan, bundle)
        place = [simulator.options[name] for name in ("subscription", "resource_group", "workspace")]
        program = Path(__file__).with_name("with_ml_client.py")
        seen = json.loads(run(python, program, simulator.url, *place, tmp_path / "downloaded"))
        assert seen["created"] in ("NotStarted", "Queued", "Preparing", "Starting", "Running")
        shown = [line for line in seen["streamed"].splitlines() if line.startswith(("node", "end"))]
        assert shown == ["node 0", "end"], "the SDK streams the log of process 0 alone"
        assert "Execution Summary" in seen["streamed"] and "exited with status code 3" in seen["failed"]
        ended = {"two": "Completed", "fails": "Failed", "long": "Canceled"}
        assert {name: seen["states"][name] for name in ended} == ended
        assert seen["tags"] == {"of": "a stranger"} and seen["listed"] == ["long", "fails", "two", "ours-a1"]
        assert seen["runs"] == {"two": ["Completed", "20"], "long": ["Canceled", "20"]}
        assert seen["not_runs"] == ["ours-a1"], "it is of another experiment"
        own = plan.request["job"]["properties"]
        assert seen["ours"] == [own["command"], 87330, own["inputs"]["source"]["uri"]]
        logs = {f"artifacts/user_logs/std_log_process_{node}.txt": f"node {node}\nend\n" for node in (0, 1)}
        assert seen["downloaded"] == logs and seen["absent"] == 404
        assert not any(status >= 500 for _, status in simulator.server.responses)
    finally:
        simulator.close()
