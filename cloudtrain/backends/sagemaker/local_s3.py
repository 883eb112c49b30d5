"""Download a local-mode job's inputs from S3 before its containers start, and upload its results after they end.

<attempt>/store.json        region, profile and endpoint, only for a job that uses S3
<attempt>/inputs/<name>/    a downloaded channel, until the attempt ends
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.aws import Aws
from cloudtrain.backends.store.download import download_all
from cloudtrain.backends.store.s3 import S3
from cloudtrain.errors import BackendError, DiskError

ARCHIVES = (("model", "model.tar.gz"), ("outputs", "output.tar.gz"))


def uses_s3(request: Mapping[str, Any]) -> bool:
    """Return whether a request reads from or writes to S3."""
    results = str(request["OutputDataConfig"]["S3OutputPath"])
    channels = request["InputDataConfig"]
    return results.startswith("s3://") or any("S3DataSource" in channel["DataSource"] for channel in channels)


class LocalS3:
    """The S3 access of one attempt, with the options in its store.json."""

    def __init__(self, attempt: Path) -> None:
        self._inputs = attempt / "inputs"
        s3_options = json.loads((attempt / "store.json").read_text())
        self._aws = Aws("sagemaker-local", s3_options["region"], s3_options["profile"], s3_options["endpoint"])

    def download_inputs(self, request: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Any]:
        """Download the S3 channels and return the request with their local paths; blocking. Raises BackendError.

        Stops between two pieces when `stop` returns True.
        """
        channels = []
        for channel in request["InputDataConfig"]:
            name, source = channel["ChannelName"], channel["DataSource"].get("S3DataSource")
            if source and not stop():
                into = self._inputs / name
                into.mkdir(parents=True, exist_ok=True)
                try:
                    count = download_all(S3(self._aws, source["S3Uri"]).at_uri(), into, stop)
                except DiskError as error:
                    raise BackendError(f"the input {name} cannot be downloaded: {error.message}", error.hint) from None
                if not count:
                    raise BackendError(f"the input {name} does not exist: no files at {source['S3Uri']}")
                channel = {"ChannelName": name, "DataSource": {"FileDataSource": {"FileUri": f"file://{into}"}}}
            channels.append(channel)
        return {**request, "InputDataConfig": channels}

    def upload_results(self, request: Mapping[str, Any], run: Path) -> None:
        """Upload model and outputs to the S3 keys that SageMaker uses; blocking. Raises BackendError."""
        output = str(request["OutputDataConfig"]["S3OutputPath"])
        for name, archive in ARCHIVES:
            folder = run / name
            if output.startswith("s3://") and folder.is_dir() and any(folder.iterdir()):
                self._upload_archive(folder, f"{output}/{request['TrainingJobName']}/output/{archive}")

    def _upload_archive(self, folder: Path, uri: str) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=folder.parent) as file:
                with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                    archive.add(folder, arcname=".")
                file.flush()
                S3(self._aws, uri).write("", Path(file.name))
        except OSError as error:
            raise BackendError(f"{folder} cannot be packed: {error.strerror}", "free some disk space") from None

    def remove_inputs(self) -> None:
        """Remove the downloaded inputs."""
        shutil.rmtree(self._inputs, ignore_errors=True)
