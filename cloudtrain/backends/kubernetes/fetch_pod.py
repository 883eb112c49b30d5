"""The pod that serves files from the volumes of an ended job over HTTP: its manifest and its command.

The client reads through the API server (pods/proxy), so it needs no network route into the cluster. Every request needs
a secret header; the manifest holds only the secret's SHA-256, so others who reach the pod's port cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.kubernetes.names import CONTAINER

PORT = 29381
AUTH_HEADER = "X-Cloudtrain-Word"  # every request sends the secret in it
MAX_LIFETIME_S = 6 * 3600  # the cluster ends the pod then, if the client did not delete it
COPIED_FIELDS = (
    "nodeSelector",
    "tolerations",
    "imagePullSecrets",
    "serviceAccountName",
    "priorityClassName",
    "securityContext",
)

COMMAND = r"""
import hashlib, hmac, http.server, json, os, urllib.parse
E = os.environ
base = E["CLOUDTRAIN_BASE"]
def files(folder):
    for here, folders, names in os.walk(os.path.join(base, folder)):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(here, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield os.path.relpath(path, base), os.stat(path)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        word = hashlib.sha256(self.headers.get("X-Cloudtrain-Word", "").encode()).hexdigest()
        if not hmac.compare_digest(word, E["CLOUDTRAIN_WORD_SHA256"]):
            return self.send_error(403)
        where, _, query = self.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        if ".." in "/".join(asked.values()).split("/") or any(value.startswith("/") for value in asked.values()):
            return self.send_error(404)
        if where.endswith("/list"):
            found = [[name, about.st_size, about.st_mtime_ns] for name, about in files(asked["folder"])]
            return self.give(json.dumps(found).encode())
        name = asked["name"]
        if name not in (known for known, _ in files(name.split("/")[0])):
            return self.send_error(404)
        with open(os.path.join(base, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
            left = min(int(last or size - 1) + 1, size) - file.seek(int(first))
            self.give(None, left, f"bytes {first}-{int(first) + left - 1}/{size}")
            while left > 0 and (data := file.read(min(left, 1 << 20))):
                self.wfile.write(data)
                left -= len(data)
    def give(self, data, size=0, part=None):
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size if data is None else len(data)))
        self.end_headers()
        self.wfile.write(data or b"")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((E["CLOUDTRAIN_POD_IP"], int(E["CLOUDTRAIN_PORT"])), Handler).serve_forever()
"""


def build_pod(job: Mapping[str, Any], name: str, base: str, secret_sha256: str) -> dict[str, Any]:
    """Return the manifest of a pod that mounts a Job's volumes read-only and serves the files below `base`."""
    spec = job["spec"]["template"]["spec"]
    container = next(entry for entry in spec["containers"] if entry["name"] == CONTAINER)
    volumes = [volume for volume in spec.get("volumes") or () if "persistentVolumeClaim" in volume]
    names = {volume["name"] for volume in volumes}
    mounts = [{**mount, "readOnly": True} for mount in container.get("volumeMounts") or () if mount["name"] in names]
    env = {"CLOUDTRAIN_BASE": base, "CLOUDTRAIN_PORT": str(PORT), "CLOUDTRAIN_WORD_SHA256": secret_sha256}
    metadata, limits = job["metadata"], (container.get("resources") or {}).get("limits") or {}
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"], "uid": metadata.get("uid")}
    owners = [owner] if owner["uid"] else []  # the cluster deletes at once what a deleted Job owns
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": metadata["namespace"], "ownerReferences": owners},
        "spec": {
            **{field: spec[field] for field in COPIED_FIELDS if field in spec},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": MAX_LIFETIME_S,
            "terminationGracePeriodSeconds": 0,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": CONTAINER,
                    "image": container["image"],
                    "command": [container["command"][0], "-c", COMMAND],
                    "env": [
                        *({"name": key, "value": value} for key, value in env.items()),
                        {"name": "CLOUDTRAIN_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    ],
                    "volumeMounts": mounts,
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "128Mi"},
                        "limits": {"memory": "512Mi", **({"cpu": "1"} if "cpu" in limits else {})},
                    },
                    **{field: container[field] for field in ("securityContext",) if field in container},
                }
            ],
            "volumes": volumes,
        },
    }
