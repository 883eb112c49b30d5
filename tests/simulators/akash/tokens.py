"""Tokens of a provider's gateway: JSON Web Tokens with the claims that Akash asks for. The signature is drawn, not made.

Claims: npm @akashnetwork/chain-sdk 1.0.0-alpha.25, validateJwtPayload (specs/jwt-schema.json of akash-network/chain-sdk).
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from typing import Any

from cloudtrain.clock import SYSTEM, Clock


class Tokens:
    """The tokens of one account, by which a gateway knows who asks."""

    def __init__(self, owner: str, clock: Clock = SYSTEM) -> None:
        self._owner, self._clock = owner, clock
        self._expires: dict[str, float] = {}

    def issue(self, ttl_s: int, leases: Mapping[str, Any]) -> str:
        """Return a new token that is valid for some seconds."""
        now = int(self._clock.now())
        claims = {"iss": self._owner, "iat": now, "nbf": now, "exp": now + ttl_s, "version": "v1", "leases": leases}
        parts = [json.dumps(part).encode() for part in ({"alg": "ES256K", "typ": "JWT"}, claims)]
        token = ".".join(_encode(part) for part in (*parts, secrets.token_bytes(64)))
        self._expires[token] = now + ttl_s
        return token

    def valid(self, token: str) -> bool:
        """Return whether a token was issued and has not expired."""
        return self._clock.now() < self._expires.get(token, 0.0)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
