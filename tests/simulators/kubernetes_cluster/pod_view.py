"""Resolves environment, volumes, secrets and DNS names for the containers of a simulated pod.

Mount paths and DNS names in a container's command and environment are replaced by local folders and addresses.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.simulators.replicas import base_environment

if TYPE_CHECKING:
    from tests.simulators.kubernetes_cluster.objects import Objects

INDEX = "batch.kubernetes.io/job-completion-index"
_REFERENCE = re.compile(r"\$(\$\([^)]*\)|\(([^)]+)\))")
Object = dict[str, Any]


class PodView:
    """The environment of one pod's containers; `folder` is the pod's local folder."""

    def __init__(self, objects: Objects, pod: Object, folder: Path, claims: Path) -> None:
        self._objects, self._pod, self._folder, self._claims = objects, pod, folder, claims
        self._namespace = str(pod["metadata"]["namespace"])

    def command(self, container: Object, more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return a container's command and environment; creates its volumes."""
        mounts, names = self._mounts(container), self._host_names()
        env = {**base_environment(), **more}
        if (index := (self._pod["metadata"].get("annotations") or {}).get(INDEX)) is not None:
            env["JOB_COMPLETION_INDEX"] = index
        env["HOSTNAME"] = self._pod["spec"]["hostname"]
        for item in container.get("env", ()):
            value = self._env_value(item)
            if value is not None:
                env[item["name"]] = _localize(_expand_variables(value, env), mounts, names)
        argv = [*container.get("command", ()), *container.get("args", ())]
        return [_localize(_expand_variables(argument, env), mounts, names) for argument in argv], env

    def secret(self, reference: Mapping[str, Any]) -> str | None:
        """Return the value of a Secret's key, None where it does not exist."""
        secret = self._objects.get("secrets", self._namespace, reference["name"])
        data = (secret or {}).get("data") or {}
        plain = (secret or {}).get("stringData") or {}
        if reference["key"] in plain:
            return str(plain[reference["key"]])
        return base64.b64decode(data[reference["key"]]).decode() if reference["key"] in data else None

    def _mounts(self, container: Object) -> dict[str, str]:
        """Create the volumes; return mount path -> local folder. /dev/shm is the machine's own."""
        folders = {}
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            folder = self._folder / "volumes" / mount["name"]
            if "persistentVolumeClaim" in volume:
                folder = self._claims / self._namespace / volume["persistentVolumeClaim"]["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                config_map = self._objects.get("configmaps", self._namespace, volume["configMap"]["name"]) or {}
                for name, data in (config_map.get("binaryData") or {}).items():
                    (folder / name).write_bytes(base64.b64decode(data))
                for name, text in (config_map.get("data") or {}).items():
                    (folder / name).write_text(text)
            if mount["mountPath"] != "/dev/shm":  # noqa: S108
                folders[mount["mountPath"].rstrip("/")] = str(folder)
        return folders

    def _host_names(self) -> dict[str, str]:
        """Return DNS name -> address for the pods of the pod's headless Service."""
        subdomain = self._pod["spec"].get("subdomain")
        service = self._objects.get("services", self._namespace, subdomain) if subdomain else None
        if service is None or service["spec"].get("clusterIP") != "None":
            return {}
        selector = (service["spec"].get("selector") or {}).items()
        return {
            f"{other['spec']['hostname']}.{subdomain}": other["status"]["podIP"]
            for other in self._objects.all("pods", self._namespace)
            if other["spec"].get("subdomain") == subdomain and selector <= other["metadata"]["labels"].items()
        }

    def _env_value(self, item: Mapping[str, Any]) -> str | None:
        source = item.get("valueFrom")
        if source is None:
            return str(item.get("value", ""))
        if "secretKeyRef" in source:
            return self.secret(source["secretKeyRef"])
        field: Any = self._pod
        for key in re.findall(r"\['([^']+)'\]|([^.\[]+)", source["fieldRef"]["fieldPath"]):
            field = field.get(key[0] or key[1])
        return str(field)


def _expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does: unknown names stay, $$(NAME) becomes $(NAME)."""

    def value(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[1]
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def _localize(text: str, mounts: Mapping[str, str], names: Mapping[str, str]) -> str:
    if text in names:
        return names[text]
    for path, folder in sorted(mounts.items(), key=lambda item: -len(item[0])):
        if text == path or text.startswith(path + "/"):
            return folder + text[len(path) :]
    return text
