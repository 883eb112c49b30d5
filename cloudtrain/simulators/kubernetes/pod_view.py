"""What a container of the simulated cluster sees: its variables, mounts, secrets, and the names of other pods.

What is a mount or a DNS name in a pod is replaced, in its command and the values of its environment, by the folder or the
address that it stands for.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.simulators.replicas import shared_environment

if TYPE_CHECKING:
    from cloudtrain.simulators.kubernetes.objects import Objects

INDEX = "batch.kubernetes.io/job-completion-index"
_REFERENCE = re.compile(r"\$(\$\([^)]*\)|\(([^)]+)\))")
Object = dict[str, Any]


class PodView:
    """The view from the containers of one pod, whose folder on this machine is `folder`."""

    def __init__(self, objects: Objects, pod: Object, folder: Path, claims: Path) -> None:
        self._objects, self._pod, self._folder, self._claims = objects, pod, folder, claims
        self._where = str(pod["metadata"]["namespace"])

    def command(self, container: Object, more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return a container's command and environment; makes its volumes."""
        mounts, names = self._mounts(container), self._names()
        env = {**shared_environment(), **more}
        if (index := (self._pod["metadata"].get("annotations") or {}).get(INDEX)) is not None:
            env["JOB_COMPLETION_INDEX"] = index
        env["HOSTNAME"] = self._pod["spec"]["hostname"]
        for item in container.get("env", ()):
            value = self._value(item)
            if value is not None:
                env[item["name"]] = _real(_expanded(value, env), mounts, names)
        words = [*container.get("command", ()), *container.get("args", ())]
        return [_real(_expanded(word, env), mounts, names) for word in words], env

    def secret(self, reference: Mapping[str, Any]) -> str | None:
        """Return the value of a Secret's key, None where there is none."""
        found = self._objects.get("secrets", self._where, reference["name"])
        data = (found or {}).get("data") or {}
        plain = (found or {}).get("stringData") or {}
        if reference["key"] in plain:
            return str(plain[reference["key"]])
        return base64.b64decode(data[reference["key"]]).decode() if reference["key"] in data else None

    def _mounts(self, container: Object) -> dict[str, str]:
        """Return mount path -> folder; /dev/shm is the machine's own."""
        found = {}
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            place = self._folder / "volumes" / mount["name"]
            if "persistentVolumeClaim" in volume:
                place = self._claims / self._where / volume["persistentVolumeClaim"]["claimName"]
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                held = self._objects.get("configmaps", self._where, volume["configMap"]["name"]) or {}
                for name, data in (held.get("binaryData") or {}).items():
                    (place / name).write_bytes(base64.b64decode(data))
                for name, text in (held.get("data") or {}).items():
                    (place / name).write_text(text)
            if mount["mountPath"] != "/dev/shm":  # noqa: S108
                found[mount["mountPath"].rstrip("/")] = str(place)
        return found

    def _names(self) -> dict[str, str]:
        """Return DNS name -> address of the pods that the pod's headless Service selects."""
        subdomain = self._pod["spec"].get("subdomain")
        service = self._objects.get("services", self._where, subdomain) if subdomain else None
        if service is None or service["spec"].get("clusterIP") != "None":
            return {}
        wanted = (service["spec"].get("selector") or {}).items()
        return {
            f"{other['spec']['hostname']}.{subdomain}": other["status"]["podIP"]
            for other in self._objects.all("pods", self._where)
            if other["spec"].get("subdomain") == subdomain and wanted <= other["metadata"]["labels"].items()
        }

    def _value(self, item: Mapping[str, Any]) -> str | None:
        source = item.get("valueFrom")
        if source is None:
            return str(item.get("value", ""))
        if "secretKeyRef" in source:
            return self.secret(source["secretKeyRef"])
        here: Any = self._pod
        for key in re.findall(r"\['([^']+)'\]|([^.\[]+)", source["fieldRef"]["fieldPath"]):
            here = here.get(key[0] or key[1])
        return str(here)


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Return what Kubernetes makes of $(NAME): the value where it is known; $$(NAME) stays as $(NAME)."""

    def value(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[1]
        return env.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def _real(text: str, mounts: Mapping[str, str], names: Mapping[str, str]) -> str:
    if text in names:
        return names[text]
    for path, folder in sorted(mounts.items(), key=lambda item: -len(item[0])):
        if text == path or text.startswith(path + "/"):
            return folder + text[len(path) :]
    return text
