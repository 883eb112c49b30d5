"""Answers requests to one pod of the simulated API server: its log, programs in it, its ports, and its eviction."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from urllib.parse import parse_qsl

from cloudtrain.simulators.http import Request, Response
from tests.simulators.kubernetes_cluster import exec as exec_
from tests.simulators.kubernetes_cluster import port_forward, websocket
from tests.simulators.kubernetes_cluster.kubelet import Kubelet
from tests.simulators.kubernetes_cluster.objects import (
    StatusError,
)
from tests.simulators.kubernetes_cluster.resources import Resources


class PodRequests:
    """What a client asks of a pod itself."""

    def __init__(self, resources: Resources, kubelet: Kubelet) -> None:
        self.resources, self.kubelet = resources, kubelet

    def log(self, request: Request, namespace: str, name: str) -> Response:
        self.resources.authorize("get", "pods/log", namespace)
        query = request.query
        with self.resources.objects.lock:
            pod = self.resources.require("pods", namespace, name)
            uid = str(pod["metadata"]["uid"])
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        if query.get("follow") in ("true", "True"):
            while self.resources.objects.get("pods", namespace, name) is pod and not self.kubelet.has_ended(
                uid, container
            ):
                self.resources.objects.clock.sleep(0.02)
        containers = (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        if container not in {item["name"] for item in containers}:
            raise StatusError(400, f"container {container} is not valid for pod {name}")
        lines = self.kubelet.log(uid, container)
        if lines is None:
            message = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            raise StatusError(400, message)
        if since := query.get("sinceTime"):
            lines = [(at, text) for at, text in lines if at[:19] >= since[:19]]  # whole seconds, as on a real server
        if tail := query.get("tailLines"):
            lines = lines[-int(tail) :]
        stamped = query.get("timestamps") in ("true", "True")
        text = "".join(f"{at} {line}\n" if stamped else f"{line}\n" for at, line in lines)
        return Response(text.encode(), headers={"Content-Type": "text/plain"})

    def exec(self, request: Request, namespace: str, name: str) -> Response:
        """Run a program in a pod's container, over a websocket. Since 1.35 that needs the verb create too."""
        for verb in ("get", "create"):
            self.resources.authorize(verb, "pods/exec", namespace)
        query = parse_qsl(request.path.partition("?")[2], keep_blank_values=True)
        argv = [value for key, value in query if key == "command"]
        names = {item["name"] for item in self.resources.require("pods", namespace, name)["spec"]["containers"]}
        wanted = dict(query).get("container") or next(iter(names))
        if wanted not in names:
            raise StatusError(400, f"container {wanted} is not valid for pod {name}")
        if not argv:
            raise StatusError(400, "you must specify at least 1 command for the container")
        uid = str(self.resources.require("pods", namespace, name)["metadata"]["uid"])
        container = self.kubelet.container(uid, wanted)
        if container is None or container.code is not None:
            raise StatusError(500, f'unable to upgrade connection: container not found ("{wanted}")')
        streams = frozenset(key for key, value in query if value in ("true", "1"))

        def serve(frames: websocket.Frames) -> None:
            program = shutil.which(argv[0], path=container.env["PATH"])
            if program is None:
                failure = f'exec: "{argv[0]}": executable file not found in $PATH'
                frames.send(b"\x03" + json.dumps({"status": "Failure", "message": failure, "code": 500}).encode())
                frames.close()
                return
            exec_.Program([program, *argv[1:]], container.env, container.folder, streams, frames).serve()

        return websocket.upgrade(request, exec_.PROTOCOL, serve)

    def port_forward(self, request: Request, namespace: str, name: str) -> Response:
        """Connect to ports of a pod, over a websocket. Since 1.35 that needs the verb create too."""
        for verb in ("get", "create"):
            self.resources.authorize(verb, "pods/portforward", namespace)
        query = parse_qsl(request.path.partition("?")[2], keep_blank_values=True)
        ports = port_forward.parse_ports([value for key, value in query if key == "ports"])
        container = self.kubelet.container(str(self.resources.require("pods", namespace, name)["metadata"]["uid"]))
        if container is None or container.code is not None:
            raise StatusError(400, f"unable to forward port because pod {name} is not running")
        protocol = port_forward.PROTOCOL
        return websocket.upgrade(request, protocol, lambda frames: port_forward.serve(frames, ports, name))

    def evict(self, _: Request, namespace: str, name: str) -> Response:
        self.resources.authorize("create", "pods/eviction", namespace)
        with self.resources.objects.lock:
            self.kubelet.disrupt(self.resources.require("pods", namespace, name), "EvictionByEvictionAPI")
        return Response({"kind": "Status", "apiVersion": "v1", "status": "Success"}, 201)

    def proxy(self, request: Request, namespace: str, name: str, port: str, rest: str) -> Response:
        """Forward a request to a server in a pod, without the caller's credentials."""
        self.resources.authorize("get", "pods/proxy", namespace)
        pod = self.resources.require("pods", namespace, name)
        address = f"http://{pod['status'].get('podIP')}:{port}/{rest}?{request.path.partition('?')[2]}"
        headers = {key: value for key, value in request.headers.items() if key not in ("authorization", "host")}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as response:
                return Response(response.read(), response.status, {"Content-Type": "application/octet-stream"})
        except urllib.error.HTTPError as error:
            return Response(error.read(), error.code)
        except OSError as error:
            raise StatusError(503, f"error trying to reach service: {error}", "ServiceUnavailable") from None
