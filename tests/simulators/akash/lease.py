"""A lease of the simulated network: runs the services of a manifest as local processes, as a provider's cluster does.

A container that exits is started again. A closed lease gives 30 s between SIGTERM and SIGKILL, the default of Kubernetes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators.http import ApiError
from cloudtrain.simulators.replicas import Replica, base_environment, pick_addresses
from cloudtrain.simulators.steps import TICK_S

GRACE_S = 30.0
LOG_LINES = 10_000


class Lease(threading.Thread):
    """The services of one lease, which its thread starts and watches."""

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], services: list[dict[str, Any]], clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        super().__init__(name=f"lease-{identity['dseq']}", daemon=True)
        self._folder, self._identity, self._services = folder, identity, services
        self._addresses = pick_addresses(len(services))
        self._lock = threading.RLock()
        self._running: dict[str, Replica] = {}
        self._kill_at: float | None = None
        self._over = threading.Event()
        self.starts: dict[str, int] = {}
        self.logs: list[dict[str, str]] = []  # as the gateway streams them: service and message, without times
        self.start()

    def run(self) -> None:
        with self._lock:
            for service in self._services:  # here: the kernel ends a container with the thread that started it
                self._start(service)
        while not self._clock.wait(self._over, TICK_S):
            with self._lock:
                self._step()

    def status(self) -> dict[str, Any]:
        """Return what the gateway's route /lease/.../status has."""
        with self._lock:
            services = {}
            for service in self._services:
                replica = self._running.get(service["name"])
                ready = int(replica is not None and replica.code is None)
                counts = ("replicas", "updated_replicas", "ready_replicas", "available_replicas", "available")
                about = {"name": service["name"], "total": 1, "uris": [], "observed_generation": 1}
                services[service["name"]] = about | dict.fromkeys(counts, ready)
            return {"services": services, "forwarded_ports": {}, "ips": {}}

    def restart(self, name: str) -> None:
        """Kill a container without notice, as the kernel does when memory is out; the cluster starts it again."""
        with self._lock:
            self._running[name].kill()

    def close(self) -> None:
        """Send SIGTERM to every container, SIGKILL after the grace period; does not wait."""
        with self._lock:
            if self._kill_at is None:
                self._kill_at = self._clock.monotonic() + GRACE_S
                for replica in self._running.values():
                    replica.terminate()

    def kill(self) -> None:
        """Kill every container without notice; blocking."""
        with self._lock:
            self._kill_at = 0.0
            self._step()
        self.join(60)

    def _step(self) -> None:
        for service in self._services:
            replica = self._running.get(service["name"])
            if replica is None:
                continue
            killed = self._kill_at is not None and self._clock.monotonic() >= self._kill_at
            if replica.code is None and not killed:
                continue
            replica.kill()
            del self._running[service["name"]]
            if self._kill_at is None:
                self._start(service)
        if self._kill_at is not None and not self._running:
            self._over.set()

    def _start(self, service: Mapping[str, Any]) -> None:
        name = service["name"]
        number = self.starts[name] = self.starts.get(name, 0) + 1
        index = next(position for position, each in enumerate(self._services) if each["name"] == name)
        env = base_environment() | {
            "AKASH_DEPLOYMENT_SEQUENCE": str(self._identity["dseq"]),
            "AKASH_GROUP_SEQUENCE": "1",
            "AKASH_ORDER_SEQUENCE": "1",
            "AKASH_OWNER": str(self._identity["owner"]),
            "AKASH_PROVIDER": str(self._identity["provider"]),
            # All containers are on this machine, which has one name: on a cluster a pod asks for its own.
            "CLOUDTRAIN_POD_IP": self._addresses[index],
        }
        for each, address in zip(self._services, self._addresses, strict=True):
            # Kubernetes sets these for the services of a namespace; here they also stand for its DNS.
            env[f"{each['name'].upper().replace('-', '_')}_SERVICE_HOST"] = address
        env |= dict(item.split("=", 1) for item in service["env"] or ())
        command = [*(service["command"] or ()), *(service["args"] or ())]
        folder = self._folder / f"{name}-{number}"

        def write(lines: list[str]) -> None:
            self.logs += [{"name": name, "message": line} for line in lines]
            del self.logs[:-LOG_LINES]

        try:
            self._running[name] = Replica(name, command, env, folder, write)
        except ApiError as error:
            write([error.message])
