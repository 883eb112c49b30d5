"""Install the job's requirements with pip into a layer over the interpreter's packages, once per node.

    <cache>/layers/<digest>/           a virtual environment that also sees the packages of the interpreter below it
    <cache>/layers/<digest>/COMPLETE   written last; it holds the interpreter to use

torch is pinned to the installed version: an image's torch fits its driver, and is never replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from ..errors import Refused
from ..log import Log

PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
PINNED = "torch"


def layer(path: str, environ: Mapping[str, str], log: Log) -> str:
    """Return the interpreter that has what a requirements file asks for; blocking (pip). Raises Refused, OSError."""
    wanted = read(path)
    if not any(line.strip() and not line.strip().startswith("#") for line in wanted.splitlines()):
        return sys.executable
    cache = environ.get("CLOUDTRAIN_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "cloudtrain")
    folder = os.path.join(cache, "layers", digest(wanted, os.path.dirname(path)))
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    import fcntl

    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several nodes of one machine, or several runs, want the same layer
        mark = os.path.join(folder, "COMPLETE")
        try:
            with open(mark, encoding="utf-8") as file:
                interpreter = file.read()
            if os.path.exists(interpreter):
                return interpreter
        except OSError:
            pass
        python = build(path, folder, environ, log)
        with open(f"{mark}.half", "w", encoding="utf-8") as file:
            file.write(python)
        os.replace(f"{mark}.half", mark)
    return python


def for_pip(environ: Mapping[str, str], job: Mapping[str, str]) -> dict[str, str]:
    """Return the node's environment with what the job's env and secrets set for pip: PIP_INDEX_URL, NETRC and the like.

    An index with a password in its address is so known to pip alone, not to the requirements file or a command line.
    """
    from ..output.store import PROXY

    return {
        **environ,
        **{name: value for name, value in job.items() if name.startswith("PIP_") or name in ("NETRC", *PROXY)},
    }


def read(path: str) -> str:
    """Return the text of a requirements file with the files that it includes; raises Refused when one is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"the requirements file {os.path.basename(path)} cannot be read: {error}") from None
    folder = os.path.dirname(path)
    pattern = re.compile(r"^[^\S\n]*(?:-r|--requirement|-c|--constraint)[\s=]*(\S+)", re.M)
    return text + "".join(read(os.path.join(folder, name)) for name in pattern.findall(text) if "://" not in name)


def digest(wanted: str, source: str) -> str:
    """Return the name of a layer: it changes with the requirements, the interpreter and what is installed in it."""
    parts = [wanted, sys.version, sys.executable]
    for folder in packages():
        parts += [folder, *sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))]
    if any(map(is_local, wanted.splitlines())):
        parts.append(source)  # a package within the source: it may have changed
    parts += wheels(wanted, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def wheels(wanted: str, source: str) -> list[str]:
    """Return names and digests of the files in folders of the source that `--find-links` names."""
    digests = []
    for name in re.findall(r"^[^\S\n]*(?:-f|--find-links)[\s=]*(\S+)", wanted, re.M):
        folder = os.path.join(source, name)
        if "://" in name or os.path.isabs(name) or not os.path.isdir(folder):
            continue
        for file in sorted(os.listdir(folder)):
            path = os.path.join(folder, file)
            if os.path.isfile(path):
                with open(path, "rb") as stream:
                    digests += [file, hashlib.sha256(stream.read()).hexdigest()]
    return digests


def is_local(line: str) -> bool:
    """Return whether a line of a requirements file asks for something that lies in the source."""
    line = line.partition(" #")[0].strip()
    if line.startswith(("-e", "--editable")):
        return True
    return not line.startswith(("-", "#")) and (
        "file:" in line or ("/" in line and "://" not in line) or line[:1] == "."
    )


def packages() -> list[str]:
    """Return the folders from which this interpreter imports installed packages."""
    return [
        folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages")) and os.path.isdir(folder)
    ]


def build(path: str, folder: str, environ: Mapping[str, str], log: Log) -> str:
    """Install into a new layer and return its interpreter; nothing is installed where nothing is missing."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)  # one that was never completed
    os.makedirs(folder)
    constraints = os.path.join(folder, "constraints.txt")
    with open(constraints, "w", encoding="utf-8") as file:
        try:
            file.write(f"{PINNED}=={metadata.version(PINNED)}\n")
        except metadata.PackageNotFoundError:
            pass
    install = ["install", "--progress-bar", "off", "-r", path, "-c", constraints]
    code, lines = run([sys.executable, *PIP, *install, "--no-index", "--dry-run"], path, environ)
    if code == 0 and not any(line.startswith("Would install") for line in lines):
        log.say(f"{os.path.basename(path)}: everything is installed already")
        return sys.executable
    if any("No module named pip" in line for line in lines):
        raise Refused(f"{os.path.basename(path)} cannot be installed: {sys.executable} has no pip")
    python = os.path.join(folder, "bin", "python")
    code, lines = run([sys.executable, "-m", "venv", "--without-pip", folder], path, environ)
    if code != 0:
        raise Refused(
            f"no virtual environment for {os.path.basename(path)} can be made: {lines[-1] if lines else f'venv exited {code}'}"
        )
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    with open(os.path.join(own, "_cloudtrain_below.pth"), "w", encoding="utf-8") as file:
        # addsitedir rather than a bare path: .pth files there (editable installs) count too.
        file.writelines(f"import site; site.addsitedir({folder!r})\n" for folder in packages())
    code, lines = run([sys.executable, *PIP, "--python", python, *install], path, environ, log)
    if code != 0:
        raise Refused(f"{os.path.basename(path)} cannot be installed: {conflict(lines)}")
    return python


def run(command: list[str], path: str, environ: Mapping[str, str], log: Log | None = None) -> tuple[int, list[str]]:
    """Run a command beside the requirements file and return its exit code and lines; they go to the log too."""
    env = {name: value for name, value in environ.items() if not name.startswith("CLOUDTRAIN_MANIFEST_")}
    lines = []
    with subprocess.Popen(
        command,
        cwd=os.path.dirname(path),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if log is not None and not line.startswith("Requirement already satisfied"):
                log.say(line.rstrip())
    return process.returncode, lines


def conflict(lines: list[str]) -> str:
    """Return pip's own error message as one line; where build requirements are not found, what to do instead."""
    if any("No space left on device" in line or "Disk quota exceeded" in line for line in lines):
        return "the disk is full"
    errors = [line[len("ERROR: ") :].rstrip(".") for line in lines if line.startswith("ERROR: ")]
    # What a subprocess of pip printed is indented, and tells more than pip's own last lines about it.
    nested = [line.strip()[len("ERROR: ") :] for line in lines if re.match(r"\s+ERROR: ", line)]
    if nested and any("subprocess-exited-with-error" in line for line in lines):
        building = any(re.search(r"^(?>.*?build dependencies ).*(not run successfully|error)", line) for line in lines)
        reached = not any(re.search("Retrying|connection broken|Could not fetch", line) for line in lines)
        if building and reached:  # else the network is the cause
            package = [line.split()[1] for line in lines if re.match(r"(Processing|Collecting) \S", line)][-1:]
            name = package[0] if package else "a package"
            return f"{nested[0]}: it is a build requirement of {name}; name a wheel of {name} instead"
        return nested[0]
    causes = [line.strip() for line in lines if re.match(r"\s+(The user requested|\S+ .*depends on) ", line)]
    return "; ".join([*errors[:1], *causes]) or _last_telling(lines)


def _last_telling(lines: list[str]) -> str:
    """Return the last line that says what happened: no note, and no reference to other lines."""
    telling = [line for line in lines if line.strip() and not re.match(r"note: |hint: |╰─> |│ ", line)]
    return telling[-1].removeprefix("× ") if telling else "pip printed nothing"
