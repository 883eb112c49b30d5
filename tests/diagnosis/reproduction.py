"""Makes a real entry's log again: its script under the real launcher, with what is this machine's taken out."""

from __future__ import annotations

import re
import shutil
import socket
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.entrypoints.launching import ENTRYPOINTS, Attempt

MARK = "::cloudtrain::"  # the launcher's events: `end` says what they say
# A script's threads, retries and caches are none of the test's business; nobody may ask the network.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}
ABSENT = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


class Failing(Attempt):
    """An attempt that lacks variables which a test's nodes otherwise have."""

    def __init__(self, *given: Any, without: tuple[str, ...], **more: Any) -> None:
        super().__init__(*given, **more)
        self.without = without

    def environment(self, rank: int) -> dict[str, str]:
        return {name: value for name, value in super().environment(rank).items() if name not in self.without}


def reproduce(script: str, launch: Mapping[str, Any], root: Path) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return the log (node, rank, text) and the end of a script that fails under the launcher; blocking."""
    attempt = Failing(
        root,
        script,
        without=(*ABSENT, *launch.get("without", ())),
        nodes=launch.get("nodes", 1),
        processes=launch.get("processes", 1),
        argv=tuple(launch.get("argv", ("train.py",))),
        files=launch.get("files"),
        environ=QUIET | {"HF_HOME": str(root / "hf")} | launch.get("environ", {}),
        **launch.get("manifest", {}),
    )
    with attempt:
        for folder in attempt.folders:
            for name in launch.get("entrypoints", ()):
                shutil.copy(ENTRYPOINTS / name, folder / "source" / ".cloudtrain")
            for wheel, needs in launch.get("wheels", {}).items():
                write_wheel(folder / "source" / "wheels", wheel, needs)
        attempt.run()
        log = [
            [node, rank, neutral(text, root)]
            for node in range(len(attempt.folders))
            for _, rank, _, text in attempt.lines(node)
            if not text.startswith(MARK)
        ]
        status = attempt.status() or {}
    end = {name: status.get(name) for name in ("state", "exit_code", "reason", "by", "failed_rank")}
    end["reason"] = neutral(str(end["reason"] or ""), root)
    return log, end


def neutral(text: str, root: Path) -> str:
    """Return a line without the folders and the name of the machine that made it."""
    for found, told in (
        (str(root), "/runs/job"),
        (sysconfig.get_path("purelib"), "/opt/venv/lib/python3.11/site-packages"),
        (sys.prefix, "/opt/venv"),
        (sysconfig.get_path("stdlib"), "/usr/lib/python3.11"),
        (sys.base_prefix, "/usr"),
        (str(Path(__file__).resolve().parents[2]), "/home/user/project"),
        (socket.gethostname(), "node-1"),
    ):
        text = text.replace(found, told)
    return text


def alike(text: str) -> str:
    """Return a line with numbers and addresses left open: two runs agree in the rest."""
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text))


def write_wheel(folder: Path, name: str, needs: list[str]) -> None:
    """Write an empty distribution, as in textkit-1.0, with its requirements."""
    folder.mkdir(exist_ok=True)
    project, _, version = name.rpartition("-")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        lines = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
