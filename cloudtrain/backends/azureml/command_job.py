"""Convert the YAML of an azure-ai-ml command job into a job and notes (`cloudtrain init --from job.yml`). Pure but for one read.

Keys: CommandJobSchema and its parts of azure-ai-ml 1.35.2, and the page "CLI (v2) command job YAML schema" (2026-11-30).
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.azureml.request import is_datastore
from cloudtrain.errors import BadJob, BadRequest, page
from cloudtrain.job.document import read_yaml, written
from cloudtrain.job.placeholders import variable
from cloudtrain.job.problems import fit_name
from cloudtrain.source.literals import read_code

_BINDING = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")
_OPTIONAL = re.compile(r"\$\[\[([^\[]*?)\]\]")  # left out where an input in it has no value
_PLACEHOLDER = re.compile(r"\{(?:input:\w+|output_dir|model_dir)\}")
_SHELL = re.compile(r"[^\w\s./:=,@%+\"'-]|\n")  # what a shell would read as more than words
_INSTALL = re.compile(r"(?:python3? -m )?pip3? install\b")
_SCHEMA = re.compile(r"/(\w+)\.schema\.json")
_BLOBS = (
    re.compile(r"wasbs?://(?P<container>[^@/]+)@(?P<account>\w+)\.blob\.core\.windows\.net/?(?P<path>.*)"),
    re.compile(r"abfss?://(?P<container>[^@/]+)@(?P<account>\w+)\.dfs\.core\.windows\.net/?(?P<path>.*)"),
    re.compile(r"https://(?P<account>\w+)\.(?:blob|dfs)\.core\.windows\.net/(?P<container>[^/?]+)/?(?P<path>[^?]*)"),
)
_MODELS = ("custom_model", "mlflow_model", "triton_model")
_OWN_VARIABLES = re.compile(r"\$\{?((?:AZUREML|AZ_BATCH|OMPI|NODE_RANK)\w*)")
TARGET = "subscription, resource_group, workspace and store belong to [targets.azureml] of cloudtrain.toml"
WITHOUT = {  # keys without a counterpart, and what there is instead
    "services": "no interactive services are started; cloudtrain console shows metrics and files",
    "description": "",
    "name": "each run has a name of its own",
    "parent_job_name": "runs have no parent; use labels",
    "notification_settings": "write [notify] into cloudtrain.toml",
    "schedule": "start cloudtrain submit by a schedule of your own",
    "resources.properties": "is not sent",
    "resources.docker_args": "is not sent",
    "resources.locations": "the workspace's region is used",
    "resources.max_instance_count": "write num_nodes",
    "environment.conda_file": "conda is not used: list its packages in environment.requirements, or build an image",
    "environment.build": "build the image yourself, push it, and name it: image",
    "distribution.parameter_server_count": "there are no parameter servers; num_nodes counts workers",
}
_ORDER = ("name", "source", "image", "setup", "entrypoint", "run", "args", "ray", "distributed_env", "num_nodes",
          "processes_per_node", "resources", "limits", "inputs", "env", "labels", "options")  # fmt: skip
_SILENT = ("$schema", "type")


def convert_file(path: Path) -> tuple[dict[str, Any], list[str]] | None:
    """Return the job and the notes of a command job's YAML, or of a call of `command(...)`, None for another file.

    Raises BadRequest, BadJob.
    """
    if path.suffix in (".py", ".ipynb"):
        from cloudtrain.backends.azureml import command_call

        found = command_call.read(read_code(path), path)
        if found is None:
            return None
        given, computed = found
        job, notes = convert({"command": "exit 1  # write the command here", **given})
        return job, [*computed, *notes]
    if path.suffix not in (".yaml", ".yml"):
        return None
    document = read_yaml(path.read_bytes(), str(path))
    given = document.value
    if not isinstance(given, Mapping):
        return None
    address = str(given.get("$schema"))
    schema = _SCHEMA.search(address) if "azureml" in address else None
    kind = schema[1] if schema else "commandJob" if given.get("type") == "command" and "command" in given else ""
    if not kind:
        return None
    if document.problems:
        raise BadJob(document.problems)
    if kind != "commandJob" or not isinstance(given.get("command"), str):
        message = f"{path} is a {kind} without a command" if kind == "commandJob" else f"{path} is a {kind}"
        raise BadRequest(f"{message}; only a command job can be converted", "write each command job to its own file")
    return convert(given)


def convert(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the job of a command job, and a note on each key that it cannot have."""
    return _Conversion(given).result()


class _Conversion:
    """One conversion: every value is taken out of `left` by its dotted key, and what is left over becomes a note."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = dict(_flatten(given))
        self._job: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self._notes: list[str] = []
        self._bound: dict[tuple[str, str], str] = {}  # (inputs, NAME) -> text, or a placeholder

    def result(self) -> tuple[dict[str, Any], list[str]]:
        self._read_names()
        self._read_machines()
        self._read_environment()
        inputs = self._read_inputs()
        folders = self._read_outputs()
        processes = self._read_distribution()
        self._read_command(folders, processes)
        variables = self._take_all("environment_variables")
        rest = {
            "env": {name: _BINDING.sub(self._placeholder, written(value)) for name, value in variables.items()},
            "inputs": inputs,
            "labels": {name: written(value) for name, value in self._take_all("tags").items()},
            "options": {"azureml": self._options} if self._options else {},
        }
        self._job.update({key: value for key, value in rest.items() if value})
        for key, value in self._left.items():
            if key not in _SILENT and value not in (None, {}, []):
                top = key.partition(".")[0]
                why = WITHOUT.get(key, WITHOUT.get(top, "has no counterpart in a job file"))
                self._note(key, *filter(None, (why, _shown(value))))
        self._note("target", TARGET)
        return {key: self._job[key] for key in _ORDER if key in self._job}, list(dict.fromkeys(self._notes))

    def _note(self, key: str, *texts: str) -> None:
        self._notes.append(f"{key}: {': '.join(texts)}")

    def _take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def _take_all(self, prefix: str) -> dict[str, Any]:
        keys = [key for key in self._left if key.startswith(f"{prefix}.")]
        return {key[len(prefix) + 1 :]: self._left.pop(key) for key in keys}

    # -- what needs no other key ---------------------------------------------------------------------------------------

    def _read_names(self) -> None:
        shown = self._take("display_name") or self._take("name")
        if shown:
            self._job["name"] = fit_name(str(shown))
            if self._job["name"] != shown:
                self._note("display_name", f"a job's name has small letters, digits and -: {shown}")
        if experiment := self._take("experiment_name"):
            self._options["experiment"] = str(experiment)
        if self._left.get("code") is None:
            self._note("code", "is missing there, so no file is sent; cloudtrain packages source")
        elif re.match(r"azureml:|https?://", str(self._left["code"])):
            self._note("code", f"write the folder or git+https://HOST/REPO@REVISION into source: {self._take('code')}")
        else:
            self._job["source"] = str(self._take("code"))

    def _read_machines(self) -> None:
        options = self._options
        resources: dict[str, Any] = {}
        compute = str(self._take("compute") or "").removeprefix("azureml:").rpartition("/")[2]
        if compute == "local":
            self._note("compute", "runs on this machine: cloudtrain submit -t local, for a script without image")
        elif compute and compute != "serverless":
            options["compute"] = compute
        if count := _whole(self._left.get("resources.instance_count")):
            self._take("resources.instance_count")
            self._job["num_nodes"] = count
        if kind := self._take("resources.instance_type"):
            resources["instance_type"] = str(kind)
        if memory := re.fullmatch(r"([1-9]\d*)g", str(self._left.get("resources.shm_size")), re.IGNORECASE):
            self._take("resources.shm_size")
            options["shm_gb"] = int(memory[1])
        tier = str(self._left.get("queue_settings.job_tier", "")).lower()
        if tier in ("spot", "standard", "null"):
            self._take("queue_settings.job_tier")
            resources |= {"use_spot": True} if tier == "spot" else {}
        priority = str(self._left.get("queue_settings.priority", "")).lower()
        if priority in ("low", "medium", "high") and "compute" not in options:
            self._take("queue_settings.priority")
            options["priority"] = priority
        if resources:
            self._job["resources"] = resources
        if seconds := _whole(self._left.get("limits.timeout")):
            self._take("limits.timeout")
            self._job["limits"] = {"max_runtime": f"{seconds}s"}
        elif "limits.timeout" not in self._left:
            self._note("limits.timeout", "is missing there; cloudtrain ends an attempt after 24h: limits.max_runtime")
        who = str(self._left.get("identity.type", "")).lower()
        if who in ("managed", "managed_identity", "user_identity", "user"):
            self._take("identity.type")
            options["identity"] = "user" if who.startswith("user") else "managed"
            if options["identity"] == "managed" and (client := self._take("identity.client_id")):
                options["client_id"] = str(client)
        elif who in ("aml_token", "amltoken"):
            self._take("identity.type")

    def _read_environment(self) -> None:
        if image := self._take("environment.image"):
            self._job["image"] = str(image)
        if name := self._take("environment"):
            self._options["environment"] = str(name)

    # -- inputs, outputs, command --------------------------------------------------------------------------------------

    def _read_inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        mounted = []
        flat = self._take_all("inputs")
        for name in dict.fromkeys(key.partition(".")[0] for key in flat):
            fields = {key.partition(".")[2]: value for key, value in flat.items() if key.partition(".")[0] == name}
            value = next((fields[key] for key in ("", "default") if key in fields), None)
            if "path" not in fields:
                if value is not None:
                    self._bound["inputs", name] = str(value) if isinstance(value, bool) else written(value)
                continue
            uri, mode = _blob(str(fields["path"])), str(fields.get("mode") or "ro_mount")
            ours = "stream" if mode == "direct" else "mount" if is_datastore(uri) and mode == "ro_mount" else ""
            inputs[name] = {"uri": uri, "mode": ours} if ours else uri
            self._bound["inputs", name] = f"{{input:{name}}}"
            if not uri.startswith("az://") and not is_datastore(uri):
                self._note(f"inputs.{name}", f"write where it is, az://CONTAINER@ACCOUNT/PATH, instead of {uri}")
            if fields.get("type") not in (None, "uri_file", "uri_folder"):
                self._note(f"inputs.{name}.type", f"{fields['type']} is files like others here")
            mounted += [name] if not ours and mode != "download" else []
            for key in fields.keys() - {"type", "path", "mode"}:
                self._note(f"inputs.{name}.{key}", f"has no counterpart in a job file: {fields[key]}")
        if mounted:
            self._note("inputs", f"copied to each node before the start, not mounted: {', '.join(mounted)}")
        return inputs

    def _read_outputs(self) -> list[str]:
        """Return the folders below the run's outputs that the command expects."""
        folders: list[str] = []
        flat = self._take_all("outputs")
        for name in dict.fromkeys(key.partition(".")[0] for key in flat):
            fields = {key.partition(".")[2]: value for key, value in flat.items() if key.partition(".")[0] == name}
            model = fields.get("type") in _MODELS and "{model_dir}" not in self._bound.values()
            self._bound["outputs", name] = "{model_dir}" if model else f"{{output_dir}}/{name}"
            folders += [] if model else [name]
            place = "model" if model else f"outputs/{name}"
            unused = [
                f"{key} {value}" for key, value in fields.items() if key not in ("", "type") and value is not None
            ]
            self._note(
                f"outputs.{name}", f"is {place} of the run", *(["not used", ", ".join(unused)] if unused else [])
            )
        return folders

    def _read_distribution(self) -> int:
        """Return the ranks of a node; 0 without a distribution."""
        kind = str(self._left.get("distribution.type", "")).lower()
        if kind not in ("pytorch", "mpi", "tensorflow", "ray"):
            return 0
        self._take("distribution.type")
        count = _whole(self._left.get("distribution.process_count_per_instance"))
        if count:
            self._take("distribution.process_count_per_instance")
        if kind == "tensorflow":
            self._job["distributed_env"] = "tensorflow"
            workers = _whole(self._take("distribution.worker_count"))
            if workers and workers != self._job.setdefault("num_nodes", workers):
                self._note(
                    "distribution.worker_count", f"{workers} workers, but instance_count nodes: num_nodes is used"
                )
        elif kind == "ray":
            self._job["ray"] = True
        elif kind == "mpi":
            self._note("distribution", "no mpirun: ranks have RANK, WORLD_SIZE and MASTER_ADDR, not OMPI_ variables")
        return count or 1

    def _read_command(self, folders: list[str], ranks: int) -> None:
        command = str(self._take("command")).replace("\\\n", " ").strip()
        command = _OPTIONAL.sub(lambda found: found[1] if self._given(found[1]) else "", command)
        if "$[[" in command:
            self._note("command", "$[[...]] with a [ in it stays as it is: write what it stands for")
        text = _BINDING.sub(self._placeholder, command)
        made = [f'mkdir -p "$CLOUDTRAIN_OUTPUT_DIR/{name}"' for name in folders]
        *before, last = (part.strip() for part in text.split("&&"))
        found = _script(last)
        if found and all(_INSTALL.match(each) and not _SHELL.search(each) for each in before):
            self._job["entrypoint"], args = found
            self._job |= {"args": args} if args else {}
            self._job |= {"processes_per_node": ranks or 1} if "ray" not in self._job else {}
            self._job |= {"setup": "\n".join([*made, *before])} if made or before else {}
        else:
            several = re.search(r"[;|\n]", _BINDING.sub("", command)) is not None
            lines = [*(["set +e"] if several else []), *made, _BINDING.sub(self._variable, command)]
            self._job["run"] = "\n".join(lines) + "\n"
            if several:
                self._note("command", "set +e: as there, only the last command's exit code counts")
            if re.search(r"'[^'\n]*\$\{\{[^'\n]*'", command):
                self._note("command", "between ' a shell replaces no variable: write \" there")
            if ranks and "ray" not in self._job:
                hint = "RANK is not set in run: name a script, or start the ranks with torchrun"
                self._note("distribution", f"the command runs once on each node, not {ranks} times: {hint}")
        if own := sorted(set(_OWN_VARIABLES.findall(command))):
            self._note("command", f"on this platform only, see {page('scripts')}: {', '.join(own)}")

    def _given(self, text: str) -> bool:
        return all((kind, name) in self._bound for kind, name in _BINDING.findall(text))

    def _placeholder(self, found: re.Match[str]) -> str:
        text = self._bound.get((found[1], found[2]))
        if text is None:
            self._note(f"{found[1]}.{found[2]}", "has no value: write one into the command")
            return found[0]
        return text

    def _variable(self, found: re.Match[str]) -> str:
        text = self._bound.get((found[1], found[2]), found[0])
        return _PLACEHOLDER.sub(lambda each: f"${{{variable(each[0][1:-1])[1:]}}}", text)


def _script(text: str) -> tuple[str, list[str]] | None:
    """Return entrypoint and arguments of a command that is a call of Python on a script or a module, else None."""
    if _SHELL.search(_PLACEHOLDER.sub("", text)):
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if not words or words.pop(0) not in ("python", "python3"):
        return None
    if words[:1] == ["-u"]:  # the launcher's ranks are never buffered
        del words[0]
    if words[:1] == ["-m"] and len(words) > 1:
        return f"-m {words[1]}", words[2:]
    script = posixpath.normpath(words[0]) if words else ""
    return (script, words[1:]) if script.endswith(".py") and not script.startswith(("..", "/")) else None


def _flatten(given: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield dotted key -> value, two levels deep below a key at the top; what a list or a deeper mapping has stays whole."""
    for name, value in given.items():
        deeper = depth == 0 or (depth == 1 and prefix in ("inputs.", "outputs."))
        if isinstance(value, Mapping) and value and deeper:
            yield from _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _blob(uri: str) -> str:
    for pattern in _BLOBS:
        if found := pattern.fullmatch(uri):
            return f"az://{found['container']}@{found['account']}/{found['path']}".rstrip("/")
    return uri


def _whole(value: Any) -> int:
    return int(str(value)) if re.fullmatch(r"[1-9]\d*", str(value)) else 0


def _shown(value: Any) -> str:
    text = written(value) if not isinstance(value, Mapping | list) else str(value)
    return " ".join(text.split())
