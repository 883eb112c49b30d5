"""Keep what is known of an attempt in the store, one small object a fact, each written once, for every process to read.

<store>/akash/<attempt id>/intent-<n>   hash and manifest of a deployment, before it is asked for
                           lease        the accepted bid: the attempt exists from here on
                           cancel       somebody asked for its end
                           ending       when its end, or the end of its lease, was first seen
                           end          its final status
                           began-<node>, end-<node>, given   written and read by the containers (container.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.aws import Aws
from cloudtrain.backends.store.s3 import S3

MOST_BYTES = 64 << 20  # of one object: an intent has the manifest with the program and the addresses of each node


class Control:
    """The objects of one attempt. Every call blocks; raises BackendError."""

    def __init__(self, aws: Aws, store: str, attempt_id: str) -> None:
        self._store = S3(aws, f"{store.rstrip('/')}/akash/{attempt_id}")
        self._known: dict[str, Any] = {}  # objects that never change

    def read(self, name: str) -> Any:
        """Return an object's JSON, None where there is none."""
        if name not in self._known:
            data = self._store.read(name, MOST_BYTES)
            if data is None:
                return None
            try:
                self._known[name] = json.loads(data)
            except ValueError:
                return None
        return self._known[name]

    def create(self, name: str, data: Any) -> bool:
        """Write an object unless it exists; return whether this call wrote it."""
        return self._store.add(name, json.dumps(data).encode())

    def names(self) -> list[str]:
        """Return the names of the objects."""
        return [stored.name for stored in self._store.objects()]

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def url(self, name: str, method: str, seconds: int) -> str:
        """Return a presigned URL of an object."""
        return self._store.url(name, method, seconds)

    def intents(self) -> list[Mapping[str, Any]]:
        """The deployments that were asked for, or were to be."""
        names = sorted(name for name in self.names() if name.startswith("intent-"))
        return [intent for name in names if (intent := self.read(name))]
