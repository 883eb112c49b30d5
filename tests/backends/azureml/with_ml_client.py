"""What MLClient of azure-ai-ml sees of a simulated workspace: `with_ml_client.py URL SUBSCRIPTION GROUP WORKSPACE FOLDER`.

It imports nothing of ours. The client knows clouds by name: one more is written into its private table, and the address of
storage accounts is replaced. azure-core sends no token over http: that check is left out, and is all that is.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

logging.disable()

from azure.ai.ml import MLClient, PyTorchDistribution, _azure_environments, command  # noqa: E402
from azure.ai.ml.constants import _common  # noqa: E402
from azure.ai.ml.exceptions import JobException  # noqa: E402
from azure.core.credentials import AccessToken  # noqa: E402
from azure.core.exceptions import ResourceNotFoundError  # noqa: E402
from azure.core.pipeline.policies import _authentication  # noqa: E402

URL, SUBSCRIPTION, GROUP, WORKSPACE, FOLDER = sys.argv[1:]
ID = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"


class Credential:
    """A token without a login."""

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        return AccessToken("token", int(time.time()) + 3600)


def make(client: MLClient, name: str, line: str, nodes: int = 1) -> str:
    """Create a command job and return its status."""
    job = command(
        name=name,
        display_name=name,
        experiment_name="strangers",
        command=line,
        environment=f"{ID}/environments/cloudtrain/versions/1",
        instance_type="Standard_D4s_v3",
        instance_count=nodes,
        tags={"of": "a stranger"},
        distribution=PyTorchDistribution(process_count_per_instance=1) if nodes > 1 else None,
    )
    return str(getattr(client.jobs.create_or_update(job).status, "value", ""))


def streamed(client: MLClient, name: str) -> str:
    """Return what `stream` prints, with the error that it raises."""
    text = io.StringIO()
    with redirect_stdout(text):
        try:
            client.jobs.stream(name)
        except JobException as error:
            print(error.message)
    return text.getvalue()


def main() -> dict[str, Any]:
    cloud = {**_azure_environments._environments["AzureCloud"], "resource_manager": URL}
    _azure_environments._environments["Loopback"] = cloud
    _common.STORAGE_ACCOUNT_URLS["AzureBlob"] = URL + "/{}"
    _authentication._enforce_https = lambda request: request.context.options.pop("enforce_https", None)
    client = MLClient(Credential(), SUBSCRIPTION, GROUP, WORKSPACE, cloud="Loopback")
    seen: dict[str, Any] = {"created": make(client, "two", "echo node $RANK; sleep 1; echo end", nodes=2)}
    seen["streamed"] = streamed(client, "two")
    make(client, "fails", "exit 3")
    seen["failed"] = streamed(client, "fails")
    make(client, "long", "exec sleep 600")
    client.jobs.begin_cancel("long").result(60)
    jobs = {name: client.jobs.get(name) for name in ("two", "fails", "long", "ours-a1")}
    seen["states"] = {name: str(getattr(job.status, "value", job.status)) for name, job in jobs.items()}
    seen["tags"] = jobs["two"].tags
    seen["ours"] = [jobs["ours-a1"].command, jobs["ours-a1"].limits.timeout, jobs["ours-a1"].inputs["source"].path]
    seen["listed"] = [job.name for job in client.jobs.list()]
    client.jobs.download("two", download_path=FOLDER)
    files = (path for path in Path(FOLDER).rglob("*") if path.is_file())
    seen["downloaded"] = {path.relative_to(FOLDER).as_posix(): path.read_text() for path in files}
    runs = client.jobs._runs_operations._operation.get_by_ids_by_experiment_name(
        SUBSCRIPTION, GROUP, WORKSPACE, "strangers", {"runIds": ["two", "long", "ours-a1"]}
    )
    seen["runs"] = {name: [run.status, str(run.start_time_utc)[:2]] for name, run in runs.runs.items()}
    seen["not_runs"] = list(runs.errors)
    try:
        client.jobs.get("absent")
    except ResourceNotFoundError as error:
        seen["absent"] = error.status_code
    return seen


if __name__ == "__main__":
    out = main()
    sys.stdout.write(json.dumps(out) + "\n")
