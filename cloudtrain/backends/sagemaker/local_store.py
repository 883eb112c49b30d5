"""What a job in local mode has in S3: this machine brings its channels before the containers start, and takes its results there.

<attempt>/store.json        region, profile and endpoint, where the job asks for S3 at all
<attempt>/inputs/<name>/    a channel, as long as the attempt lives
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends import s3
from cloudtrain.backends.aws import Aws
from cloudtrain.errors import BackendError

ARCHIVES = (("model", "model.tar.gz"), ("outputs", "output.tar.gz"))


def asked(request: Mapping[str, Any]) -> bool:
    """Tell whether a request reads or writes anything in S3."""
    results = str(request["OutputDataConfig"]["S3OutputPath"])
    channels = request["InputDataConfig"]
    return results.startswith("s3://") or any("S3DataSource" in channel["DataSource"] for channel in channels)


class LocalStore:
    """S3 as an attempt sees it; made from the attempt's folder."""

    def __init__(self, attempt: Path) -> None:
        self._inputs = attempt / "inputs"
        given = json.loads((attempt / "store.json").read_text())
        self._aws = Aws("sagemaker-local", given["region"], given["profile"], given["endpoint"])

    def bring(self, request: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Any]:
        """Copy the channels here and return the request with their paths; blocking until `stop`. Raises BackendError."""
        channels = []
        for channel in request["InputDataConfig"]:
            name, source = channel["ChannelName"], channel["DataSource"].get("S3DataSource")
            if source and not stop():
                into = self._inputs / name
                into.mkdir(parents=True, exist_ok=True)
                try:
                    found = s3.bring(self._aws, source["S3Uri"], into, stop)
                except OSError as error:
                    said = f"the input {name} cannot be brought here: {error.strerror}"
                    raise BackendError(said, "free some disk space") from None
                if not found:
                    raise BackendError(f"the input {name} does not exist: there is nothing at {source['S3Uri']}")
                channel = {"ChannelName": name, "DataSource": {"FileDataSource": {"FileUri": f"file://{into}"}}}
            channels.append(channel)
        return {**request, "InputDataConfig": channels}

    def take(self, request: Mapping[str, Any], run: Path) -> None:
        """Put model and outputs where SageMaker puts them; blocking. Raises BackendError."""
        output = str(request["OutputDataConfig"]["S3OutputPath"])
        for name, archive in ARCHIVES:
            folder = run / name
            if output.startswith("s3://") and folder.is_dir() and any(folder.iterdir()):
                s3.pack(self._aws, folder, f"{output}/{request['TrainingJobName']}/output/{archive}")

    def clear(self) -> None:
        """Remove what was brought here."""
        shutil.rmtree(self._inputs, ignore_errors=True)
