"""Write what azure-ai-ml renders of the shapes: `python tests/backends/azureml/with_the_sdk.py` where 1.35.2 is installed.

It imports nothing of ours, so that it runs in an environment of the SDK's alone. `_to_job` and `_to_rest_object` are private:
the version is fixed.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
logging.disable()

from azure.ai.ml import Input, Output, PyTorchDistribution, command, load_job  # noqa: E402
from azure.ai.ml._restclient.arm_ml_service._utils.model_base import SdkJSONEncoder  # noqa: E402
from azure.ai.ml.entities import ManagedIdentityConfiguration, SshJobService, UserIdentityConfiguration  # noqa: E402
from shapes import SHAPES, WORKSPACE  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "golden" / "azureml"
ENVIRONMENT = f"{WORKSPACE}/environments/cloudtrain/versions/VERSION"
OURS = {"cloudtrain_run": "run", "cloudtrain_attempt": "run-a1"}


def rendering(arguments: dict) -> dict:
    """Return the body of the PUT for the arguments of a shape."""
    given = dict(arguments)
    if who := given.pop("identity", ""):
        given["identity"] = (
            UserIdentityConfiguration() if who == "user" else ManagedIdentityConfiguration(client_id=who)
        )
    if processes := given.pop("distribution", 0):
        given["distribution"] = PyTorchDistribution(process_count_per_instance=processes)
    if key := given.pop("ssh", ""):
        given["services"] = {"ssh": SshJobService(nodes="all", ssh_public_keys=key)}
    common = {
        "name": "run-a1",
        "display_name": "run-a1",
        "experiment_name": "cloudtrain",
        "environment": ENVIRONMENT,
        "instance_count": 1,
        "command": "COMMAND ${{inputs.source}}",
        "environment_variables": {"NAME": "VALUE"},
        "inputs": {"source": Input(type="uri_file", path="https://place/SOURCE", mode="download")},
    }
    inputs = {
        name: Input(type=kind, path=path, mode=mode) for name, (kind, path, mode) in given.pop("inputs", {}).items()
    }
    common["inputs"] = {**common["inputs"], **inputs}
    outputs = given.pop("outputs", {})
    common["outputs"] = {name: Output(type=kind, path=path, mode=mode) for name, (kind, path, mode) in outputs.items()}
    job = command(**{**common, **given, "tags": {**given.get("tags", {}), **OURS}})
    body = json.loads(json.dumps(job._to_job()._to_rest_object(), cls=SdkJSONEncoder))
    return {"properties": body["properties"]}


def rendering_of_file(path: Path) -> dict:
    """Return the body of the PUT for a YAML file, without its code and its own environment, which the SDK uploads first."""
    job = load_job(path, params_override=[{"code": "."}])._to_job()
    job.code, job.environment = None, ENVIRONMENT
    body = json.loads(json.dumps(job._to_rest_object(), cls=SdkJSONEncoder))
    return {"properties": body["properties"]}


def rendering_of_call() -> dict:
    """Return the body of the PUT for the call in jobs/ranks.py, as `rendering_of_file` does."""
    from jobs.ranks import job as built

    job = built._to_job()
    job.code, job.environment = None, ENVIRONMENT
    return {"properties": json.loads(json.dumps(job._to_rest_object(), cls=SdkJSONEncoder))["properties"]}


if __name__ == "__main__":
    assert version("azure-ai-ml") == "1.35.2", version("azure-ai-ml")
    GOLDEN.mkdir(exist_ok=True)
    for name, (_, _, arguments) in SHAPES.items():
        text = json.dumps(rendering(arguments), indent=1, sort_keys=True) + "\n"
        (GOLDEN / f"{name}.json").write_text(text)
    for path in (Path(__file__).parent / "jobs").glob("*.yml"):
        path.with_suffix(".json").write_text(json.dumps(rendering_of_file(path), indent=1, sort_keys=True) + "\n")
    alike = json.loads((Path(__file__).parent / "jobs" / "ranks.json").read_text())
    assert rendering_of_call() == alike, "the call of ranks.py is not the job of ranks.yml"
    print(f"{len(SHAPES)} renderings of azure-ai-ml {version('azure-ai-ml')} are in {GOLDEN}")
