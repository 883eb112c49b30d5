"""AWS as seen from a client: one session, its clients, and every error of theirs as a sentence with what to do.

boto3 is imported when something is asked. Throttling, 5xx and lost connections are tried again by botocore itself, with
backoff and jitter; what arrives here has failed for good.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from cloudtrain.errors import BackendError, MissingExtra
from cloudtrain.importing import Quickly

TRIES = 6  # of one request; the pauses between them grow to 20 s
CONNECT_S, READ_S = 10, 60
# Tries, and both times, of what no job needs: where it does not answer nobody is to wait for long.
LIGHT = {"ecr": (2, 5, 5)}
CREDENTIALS = "set AWS_PROFILE, or options.{backend}.profile; `aws sso login` or `aws configure` makes credentials"
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
_UNKNOWN = {"UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"}
_BUSY = {"Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown", "429"}
_NOWHERE = {"NoSuchBucket"}


class AwsError(BackendError):
    """AWS refused or failed; `code` is its own word for it, `maybe_done` whether the request may have been carried out."""

    def __init__(self, message: str, hint: str = "", code: str = "", *, maybe_done: bool = False) -> None:
        super().__init__(message, hint)
        self.code = code
        self.maybe_done = maybe_done


class Aws:
    """A session of one profile and region; thread-safe like its clients. Nothing is asked before it is needed."""

    def __init__(self, backend: str, region: str | None, profile: str | None, endpoint: str | None) -> None:
        self.backend, self.profile, self.endpoint = backend, profile, endpoint
        self._region = region
        self._clients: dict[str, Any] = {}

    @cached_property
    def session(self) -> Any:
        """The boto3 session; raises MissingExtra, AwsError for a profile that does not exist."""
        try:
            with Quickly():
                import boto3
                import botocore.exceptions
        except ModuleNotFoundError:
            raise MissingExtra(f"the backend {self.backend}", self._family) from None
        try:
            return boto3.Session(profile_name=self.profile, region_name=self._region)
        except botocore.exceptions.BotoCoreError as error:
            raise AwsError(f"the AWS configuration cannot be used: {error}", self._option("profile")) from None

    @property
    def region(self) -> str:
        """The region; raises AwsError where none is configured."""
        found = self._region or self.session.region_name
        if not found:
            raise AwsError("no AWS region is configured", f"set {self._option('region')} or AWS_REGION")
        return str(found)

    def client(self, service: str) -> Any:
        """Return the client of a service, made once."""
        if service not in self._clients:
            with Quickly():  # the model of an API is a hundred thousand objects
                session = self.session
                from botocore.config import Config

                style = {"addressing_style": "path"} if self.endpoint else {}
                tries, connect_s, read_s = LIGHT.get(service, (TRIES, CONNECT_S, READ_S))
                retries = {"mode": "standard", "total_max_attempts": tries}
                config = Config(retries=retries, connect_timeout=connect_s, read_timeout=read_s, s3=style or None,
                                user_agent_extra="cloudtrain")  # fmt: skip
                self._clients[service] = session.client(
                    service, region_name=self.region, endpoint_url=self.endpoint, config=config
                )
        return self._clients[service]

    def ask(self, service: str, operation: str, **values: Any) -> Any:
        """Call an operation by its snake_case name and return the answer; blocking. Raises AwsError, MissingExtra."""
        self.session  # noqa: B018 - says what is missing where there is no botocore
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self.client(service), operation)(**values)
        except (BotoCoreError, ClientError) as error:
            action = getattr(error, "operation_name", None) or _camel(operation)  # a transfer asks several
            raise self.explained(error, f"{service}:{action}") from None

    def account(self) -> str:
        """Return the account of the credentials; blocking."""
        return str(self.ask("sts", "get_caller_identity")["Account"])

    def explained(self, error: Exception, action: str) -> AwsError:
        """Return one of botocore's errors as a sentence and a hint."""
        answer = getattr(error, "response", None)
        if not isinstance(answer, dict):
            return self._unanswered(error)
        code = str(answer.get("Error", {}).get("Code") or "")
        said = str(answer.get("Error", {}).get("Message") or "").strip().rstrip(".")
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        tries = LIGHT.get(action.partition(":")[0], (TRIES,))[0]
        if code in _EXPIRED:
            return AwsError("the AWS credentials have expired", self._renew(), code)
        if code in _UNKNOWN:
            return AwsError(f"AWS does not accept the credentials ({code})", self._credentials(), code)
        if code in _DENIED:
            found = re.search(r"to perform:? ([a-z0-9-]+:\w+)(?: on resource:? (\S+))?", said)
            missing, place = (found[1], f" on {found[2]}" if found[2] else "") if found else (action, "")
            return AwsError(f"AWS denies {missing}{place}", f"allow {missing}: docs/{self._family}.md lists all", code)
        if code == "ResourceLimitExceeded":
            hint = "ask for more in the console under Service Quotas, or choose another instance_type"
            return AwsError(f"the account's quota does not allow it: {said}", hint, code)
        if "Capacity" in code:
            return AwsError(f"AWS has no such machines free: {said}", "try again, or elsewhere, or on spot", code)
        if code in _BUSY:
            return AwsError(f"AWS asked {tries} times to slow down ({code})", "try again in some minutes", code)
        if code in _NOWHERE:
            name = answer.get("Error", {}).get("BucketName")
            there = f"there is no bucket {name}" if name else "there is no such bucket"
            return AwsError(there, f"make it, or change {self._option('bucket')}", code)
        if status >= 500:
            said = f"{action} failed on AWS's side {tries} times ({code or status})"
            return AwsError(said, "try again; health.aws.amazon.com", code or str(status), maybe_done=True)
        return AwsError(f"{action} was refused: {said or code}", "", code)

    def _unanswered(self, error: Exception) -> AwsError:
        from botocore import exceptions

        if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            return AwsError("there are no AWS credentials", self._credentials())
        if isinstance(error, exceptions.UnauthorizedSSOTokenError | exceptions.SSOTokenLoadError):
            return AwsError("the AWS credentials have expired", self._renew())
        if isinstance(error, exceptions.ParamValidationError):
            return AwsError(f"the request is not what AWS takes: {error}".replace("\n", " "))
        lost = isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError)
        said = str(error).split("\n")[0]
        return AwsError(f"AWS cannot be reached: {said}", "check the network, proxies and the region", maybe_done=lost)

    @property
    def _family(self) -> str:
        return self.backend.removesuffix("-local")

    def _option(self, name: str) -> str:
        return f"options.{self.backend}.{name}"

    def _credentials(self) -> str:
        return CREDENTIALS.format(backend=self.backend)

    def _renew(self) -> str:
        return f"renew them: aws sso login{f' --profile {self.profile}' if self.profile else ''}"


def _camel(operation: str) -> str:
    return "".join(word.capitalize() for word in operation.split("_"))
