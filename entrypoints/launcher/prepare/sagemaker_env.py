"""The variables of a SageMaker training job, SM_*, on SageMaker and elsewhere.

They are what sagemaker-training 5.1.4 sets (src/sagemaker_training/environment.py and mapping.py of
https://github.com/aws/sagemaker-training-toolkit, 2026-10-23). On SageMaker their values come from its files below
/opt/ml. Elsewhere names and shapes are equal, the paths are the run's, and a folder like /opt/ml/input is made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping

from ..manifest import Manifest
from ..world.channel import World
from ..world.cluster import Cluster, sagemaker_base
from . import gpus

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

CHANNELS = ("cloudtrain", "cloudtrain-manifest")  # of the source bundle and the manifest: no inputs of the job
GROUP = "homogeneousCluster"
LOG_LEVEL = 20
# Hyperparameters that are the toolkit's own, whatever their prefix.
TOOLKIT = ("_tuning_objective_metric", "default_user_module_name")


class SageMakerEnv:
    """SageMaker's variables on one node. Made while the node is prepared: it may run nvidia-smi."""

    def __init__(
        self,
        manifest: Manifest,
        cluster: Cluster,
        environ: Mapping[str, str],
        folders: Mapping[str, str],
        inputs: Mapping[str, str],
        interface: str,
        source: str,
        fill: Callable[[str], str],
    ) -> None:
        self._manifest, self._cluster, self._environ = manifest, cluster, environ
        self._folders, self._inputs, self._interface, self._source = folders, inputs, interface, source
        self._hyperparameters = {
            name: decode(value, fill)
            for name, value in (manifest.hyperparameters or {}).items()
            if not name.startswith("sagemaker_") and name not in TOOLKIT
        }
        self._real = cluster.does.copies_folders
        self._gpus = len(gpus.visible()) if self._real else manifest.gpus_per_node
        node = environ.get("CLOUDTRAIN_NODE_DIR") or os.path.dirname(source)
        self._base = sagemaker_base(environ) if self._real else os.path.join(node, "sagemaker")

    def variables(self, world: World) -> dict[str, str]:
        """Return the variables in the world that was found. Elsewhere than on SageMaker it writes a folder of the input."""
        hyperparameters, entry = self._hyperparameters, self._entry_point()
        resources = self._real_resources() if self._real else self._resources(world)
        config = self._real_channels() if self._real else self._lay_channels()
        channels = {name: os.path.join(self._base, "input", "data", name) for name in config}
        groups = {group["instance_group_name"]: group for group in resources.get("instance_groups", [])}
        hosts, current = resources["hosts"], resources["current_host"]
        group = resources.get("current_group_name", GROUP)
        distribution_hosts = [] if groups else list(hosts)
        output = os.path.join(self._base, "output") if self._real else self._folders["outputs"]
        both = {
            "hosts": hosts,
            "network_interface_name": resources.get("network_interface_name", "eth0"),
            "user_entry_point": entry,
            "resource_config": resources,
            "input_data_config": config,
            "output_data_dir": self._folders["outputs"],
            "current_host": current,
            "current_instance_type": resources.get("current_instance_type", "local"),
            "current_instance_group": group,
            "current_instance_group_hosts": groups.get(group, {}).get("hosts", []),
            "instance_groups": list(groups),
            "instance_groups_dict": groups,
            "distribution_instance_groups": [],
            "is_hetero": len(groups) > 1,
            "module_name": entry[:-3] if entry.endswith(".py") else entry,
            "log_level": LOG_LEVEL,
            "framework_module": self._environ.get("SAGEMAKER_TRAINING_MODULE"),
            "input_dir": os.path.join(self._base, "input"),
            "input_config_dir": os.path.join(self._base, "input", "config"),
            "output_dir": output,
            "num_cpus": os.cpu_count() or 1,
            "num_gpus": self._gpus,
            "num_neurons": 0,
            "model_dir": self._folders["model"],
            "module_dir": self._source,
            "output_intermediate_dir": os.path.join(output, "intermediate"),
        }
        topology = {"topology": resources["topology"]} if resources.get("topology") else {}
        training = {
            **both,
            "topology": resources.get("topology", []),
            "additional_framework_parameters": {},
            "channel_input_dirs": channels,
            "distribution_hosts": distribution_hosts,
            "hyperparameters": hyperparameters,
            "is_master": current == (distribution_hosts or hosts)[0],
            "is_modelparallel_enabled": None,
            "is_smddpmprun_installed": shutil.which("smddpmprun") is not None,
            "is_smddprun_installed": shutil.which("smddprun") is not None,
            "job_name": self._environ.get("TRAINING_JOB_NAME") if self._real else None,
            "master_hostname": (distribution_hosts or hosts)[0],
        }
        named = {
            **both,
            **topology,
            "hps": hyperparameters,
            "framework_params": {},
            "channels": sorted(channels),
            "training_env": training,
            "user_args": list(_arguments(hyperparameters)),
            **{f"channel_{name}": path for name, path in channels.items()},
            **{f"hp_{name}": value for name, value in hyperparameters.items()},
        }
        made = {f"SM_{name.upper()}": _text(value) for name, value in named.items()}
        return made | self._toolkit_process(current) if self._real else made

    def _toolkit_process(self, current: str) -> dict[str, str]:
        """Return what the toolkit sets in its own process, and its script inherits."""
        return {
            "CURRENT_HOST": current,
            "SAGEMAKER_JOB_NAME": self._environ.get("TRAINING_JOB_NAME", ""),
            "SAGEMAKER_REGION": self._environ.get("AWS_REGION", ""),
        }

    def _entry_point(self) -> str:
        """Return the script, the module or the program that runs; "" for a shell text."""
        argv = self._manifest.argv
        return "" if self._manifest.form == "shell" else argv[1] if argv[0] == "-m" else argv[0]

    def _real_resources(self) -> dict[str, Any]:
        text = _config_file(self._base, "resourceconfig") or self._environ.get("SM_RESOURCE_CONFIG", "")
        hosts = {"hosts": list(self._cluster.hosts), "current_host": self._cluster.host}
        return dict(json.loads(text)) if text else hosts

    def _real_channels(self) -> dict[str, Any]:
        config = json.loads(_config_file(self._base, "inputdataconfig") or "{}")
        return {name: channel for name, channel in config.items() if name not in CHANNELS}

    def _resources(self, world: World) -> dict[str, Any]:
        """Return what resourceconfig.json would hold of these nodes."""
        hosts = list(world.addresses) or [world.master_host]
        if len(set(hosts)) < world.nodes:  # simulated nodes share one machine: all of 127.0.0.0/8 is its own
            hosts = [f"127.0.0.{number + 1}" for number in range(world.nodes)]
        present = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ["eth0"]
        other = sorted(name for name in present if name != "lo") or present
        interface = (
            self._interface or self._environ.get("GLOO_SOCKET_IFNAME") or ("eth0" if "eth0" in other else other[0])
        )
        resources = {
            "current_host": hosts[world.node_rank],
            "current_instance_type": "local",
            "current_group_name": GROUP,
            "hosts": hosts,
            "instance_groups": [{"instance_group_name": GROUP, "instance_type": "local", "hosts": hosts}],
            "network_interface_name": interface,
        }
        written = self._manifest.hyperparameters or {}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in written.items()}
        self._write("hyperparameters", texts)
        self._write("resourceconfig", resources)
        return resources

    def _lay_channels(self) -> dict[str, Any]:
        """Link the inputs into a folder like /opt/ml/input/data, one folder for each, and return their configuration."""
        config = {}
        for name, path in self._inputs.items():
            if "://" in path:  # a stream has no channel
                continue
            config[name] = {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            folder = os.path.join(self._base, "input", "data", name)
            link = folder if os.path.isdir(path) else os.path.join(folder, os.path.basename(path))
            os.makedirs(os.path.dirname(link), exist_ok=True)
            if not os.path.lexists(link):
                os.symlink(path, link)
        self._write("inputdataconfig", config)
        return config

    def _write(self, name: str, value: Any) -> None:
        folder = os.path.join(self._base, "input", "config")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(value, file)


def decode(value: Any, fill: Callable[[str], str]) -> Any:
    """Return a hyperparameter as the toolkit reads it: text that is JSON is what it stands for. `fill` is for other text."""
    if isinstance(value, Mapping):
        return {name: decode(item, fill) for name, item in value.items()}
    if isinstance(value, list):
        return [decode(item, fill) for item in value]
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return fill(value)


def _arguments(hyperparameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the toolkit's arguments of hyperparameters, by name."""
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        yield f"--{name}" if len(name) > 1 else f"-{name}"
        if isinstance(value, Mapping):
            yield ",".join(f"{key}={item}" for key, item in sorted(value.items()))
        else:
            yield "" if value is None else str(value)


def _text(value: Any) -> str:
    """Return a value as the toolkit writes it into a variable."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _config_file(base: str, name: str) -> str:
    try:
        with open(os.path.join(base, "input", "config", f"{name}.json"), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
