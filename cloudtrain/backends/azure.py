"""Azure's credentials: access tokens from azure-identity, and what its errors mean."""

from __future__ import annotations

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, MissingExtra
from cloudtrain.job.providers import EXTRAS

STORAGE = "https://storage.azure.com/.default"
LOGIN = "az login; in CI set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_FEDERATED_TOKEN_FILE"


class Tokens:
    """Access tokens of whoever is logged in: environment, workload identity, managed identity, the Azure CLI."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock

    def token(self, scope: str) -> tuple[str, float]:
        """Return a token and the seconds for which it is valid; blocking. Raises MissingExtra, BackendError."""
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError:
            raise MissingExtra("Azure", EXTRAS["azure-identity"]) from None
        try:
            # a new one each time: it keeps what it read of AZURE_FEDERATED_TOKEN_FILE for 10 minutes, and CI's ends sooner
            granted = DefaultAzureCredential().get_token(scope)
        except Exception as error:  # of programs and files, too
            text = " ".join(str(error).split())[:300]
            raise BackendError(f"no credentials for Azure were found: {text}", LOGIN) from None
        return granted.token, granted.expires_on - self._clock.now()
