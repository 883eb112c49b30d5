"""Call AWS through boto3: one session for a profile and region, and every AWS error as a message with a hint.

boto3 is imported at the first call. botocore itself retries throttling, 5xx and lost connections with backoff and jitter;
the errors that arrive here are final.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, cached_property, partial
from typing import Any

from cloudtrain.backends.aws_credentials import Credentials
from cloudtrain.backends.http import network_hint, read_body
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, MissingExtra, NoCapacity, NoService, Unreachable
from cloudtrain.job.providers import EXTRAS

TRIES = 6  # tries of one request; the pauses between them grow to 20 s
CONNECT_S, READ_S = 10, 60
# service -> tries, connect and read timeouts. No job depends on these services, so a call gives up early.
OPTIONAL_SERVICES = {"ecr": (2, 5, 5), "ec2": (2, 5, 10)}
# Operations of S3 that need another permission than the one of their own name (2026-11-23):
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
PERMISSIONS = {
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    **dict.fromkeys(("s3:CreateMultipartUpload", "s3:UploadPart", "s3:CompleteMultipartUpload"), "s3:PutObject"),
}
DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"}
# The codes that botocore.retries.standard treats as throttling, and those of S3.
_THROTTLED = {
    "BandwidthLimitExceeded",
    "EC2ThrottledException",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_NO_BUCKET = {"NoSuchBucket"}


class AwsError(BackendError):
    """AWS refused a request or failed; `code` is AWS's error code.

    `resent` is true if botocore had sent the request before: an earlier try may have been carried out.
    """

    def __init__(self, message: str, hint: str = "", code: str = "", *, resent: bool = False) -> None:
        super().__init__(message, hint)
        self.code = code
        self.resent = resent


class AwsUnreachable(AwsError, Unreachable):
    """AWS did not answer, throttles, or failed with 5xx: the request may have been carried out."""


class AwsNoService(AwsUnreachable, NoService):
    """The endpoint's name has no address, or nothing listens there: no try of the call was sent."""


class AwsNoCapacity(AwsError, NoCapacity):
    """Insufficient capacity, or a quota of the account is used up."""


class _Calls(threading.local):
    """Of each thread: whether a request of its last call may have been sent."""

    may_have_sent = False


class Aws:
    """A boto3 session of one profile and region and its clients; thread-safe. Created at the first call."""

    def __init__(
        self,
        backend: str,
        region: str | None,
        profile: str | None,
        endpoint: str | None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.backend, self.profile, self.endpoint, self.clock = backend, profile, endpoint, clock
        self._region = region
        self._credentials = Credentials(profile, self._option("profile"))
        self._clients: dict[str, Any] = {}
        self._calls = _Calls()
        self._lock = threading.Lock()  # a session makes one client at a time (boto3's guide, "Multithreading")

    @cached_property
    def session(self) -> Any:
        """The boto3 session; raises MissingExtra without boto3, AwsError for a profile that does not exist."""
        try:
            import boto3  # noqa: F401
        except ModuleNotFoundError:
            if not self.backend:
                raise MissingExtra("s3://", EXTRAS["boto3"]) from None
            raise MissingExtra(f"the backend {self.backend}", self.backend.removesuffix("-local")) from None
        try:
            return self._credentials.make_session(self._region)
        except Exception as error:
            raise self.explain(error, "the credentials") from None

    @property
    def region(self) -> str:
        """The region; raises AwsError where none is configured."""
        region = self._region or self.session.region_name
        if not region:
            raise AwsError("no AWS region is configured", f"set {self._option('region')} or AWS_REGION")
        return str(region)

    def check_credentials(self) -> None:
        """Raise MissingExtra, or AwsError without a region or credentials; whether AWS accepts them is not asked. Blocking.

        A profile may ask for a code here, at a terminal, and nowhere else.
        """
        with suppress(Unreachable):
            if self.region and not self.explained(
                lambda: self._credentials.obtain(self.session), "the request for credentials"
            ):
                raise AwsError("there are no AWS credentials", self._credentials.hint)

    def client(self, service: str) -> Any:
        """Return the client of a service, made once."""
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self.explained(partial(self._make_client, service), service)
            return self._clients[service]

    def _make_client(self, service: str) -> Any:
        session = self.session
        from botocore.config import Config

        style = {"addressing_style": "path"} if self.endpoint else {}
        tries, connect_s, read_s = OPTIONAL_SERVICES.get(service, (TRIES, CONNECT_S, READ_S))
        retries = {"mode": "standard", "total_max_attempts": tries}
        config = Config(retries=retries, connect_timeout=connect_s, read_timeout=read_s, s3=style or None,
                        user_agent_extra="cloudtrain")  # fmt: skip
        client = session.client(service, region_name=self.region, endpoint_url=self.endpoint, config=config)
        client.meta.events.register("before-call", self._note_call)
        client.meta.events.register("needs-retry", self._note_try)
        # No handler of before-send: all of them are called, where another one has answered too, as moto's.
        client._endpoint.http_session = _BoundedSession(client._endpoint.http_session, self.clock)
        return client

    def _note_call(self, **_: Any) -> None:
        self._calls.may_have_sent = False

    def _note_try(self, caught_exception: Exception | None = None, **_: Any) -> None:
        """Note of each try of a call whether its request may have been sent: botocore tells of the last one alone."""
        from botocore.exceptions import EndpointConnectionError

        self._calls.may_have_sent |= not isinstance(caught_exception, EndpointConnectionError)

    def call(self, service: str, operation: str, **values: Any) -> Any:
        """Call an operation by its snake_case name and return the answer; blocking. Raises AwsError, MissingExtra."""
        called = partial(self._call, service, operation, values)
        return self.explained(called, f"{service}:{_camel_case(operation)}")

    def _call(self, service: str, operation: str, values: dict[str, Any]) -> Any:
        return getattr(self.client(service), operation)(**values)

    def explained(self, call: Callable[[], Any], usual_action: str, *, other: tuple[type[Exception], ...] = ()) -> Any:
        """Return what `call` returns; what boto3, botocore and the credentials' plugins raise is raised as AwsError.

        `other` is what `call` itself raises while nothing was sent.
        """
        self.session  # noqa: B018 - raises MissingExtra without botocore
        from boto3.exceptions import Boto3Error

        self._calls.may_have_sent = False
        try:
            return call()
        except Exception as raised:
            if isinstance(raised, CloudtrainError) or (isinstance(raised, other) and not self._calls.may_have_sent):
                raise
            wrapped = raised.__context__ if isinstance(raised, Boto3Error) else None  # upload_file wraps what it gets
            error = wrapped if isinstance(wrapped, Exception) else raised
            # One transfer calls several operations.
            name = getattr(error, "operation_name", None)
            service = "sts" if str(name).startswith("AssumeRole") else usual_action.partition(":")[0]
            action = f"{service}:{name}" if name and (":" in usual_action or service == "sts") else usual_action
            raise self.explain(error, PERMISSIONS.get(action, action)) from None

    def account(self) -> str:
        """Return the account id of the credentials; blocking."""
        return str(self.call("sts", "get_caller_identity")["Account"])

    def explain(self, error: Exception, action: str) -> AwsError:
        """Convert a botocore error into an AwsError with a message and a hint: AwsUnreachable, AwsNoCapacity, or a refusal."""
        answer = getattr(error, "response", None)
        if not isinstance(answer, dict):
            return self._explain_no_answer(error)
        metadata = answer.get("ResponseMetadata", {})
        code = str(answer.get("Error", {}).get("Code") or "")
        message = str(answer.get("Error", {}).get("Message") or "").strip().rstrip(".")
        status, resent = int(metadata.get("HTTPStatusCode") or 0), bool(metadata.get("RetryAttempts"))
        tries = OPTIONAL_SERVICES.get(action.partition(":")[0], (TRIES,))[0]
        kind, text, hint = AwsError, f"{action} was refused: {message or code}", ""
        if refusal := self._credentials.explain_refusal(code, message):
            text, hint = refusal
        elif code in DENIED:
            denied = re.search(r"to perform:? ([a-z0-9-]+:\w+)(?: on resource:? (\S+))?", message)
            permission, resource = (denied[1], f" on {denied[2]}" if denied[2] else "") if denied else (action, "")
            text, hint = (
                f"AWS denies {permission}{resource}",
                f"allow {permission}; `cloudtrain permissions -t TARGET` prints all that it needs",
            )
            if permission.startswith("sts:AssumeRole"):
                hint = "check role_arn of the profile in ~/.aws/config, and whether the role's trust policy names you"
        elif code == "ResourceLimitExceeded":
            kind, text = AwsNoCapacity, f"the account's quota does not allow it: {message}"
            hint = "request an increase in the AWS console under Service Quotas, or choose another instance_type"
        elif "Capacity" in code:
            kind, text = AwsNoCapacity, f"AWS has insufficient capacity: {message}"
            hint = "try again later, in another region, or with spot capacity"
        elif code in _THROTTLED or status in (408, 429):
            kind, text = AwsUnreachable, f"AWS asked {tries} times to send fewer requests ({code or status})"
            hint = "try again in some minutes"
        elif code in _NO_BUCKET:
            name = answer.get("Error", {}).get("BucketName")
            text = f"there is no bucket {name}" if name else "there is no such bucket"
            hint = f"create it, or change {self._option('bucket')}"
        elif status >= 500:
            kind, request_id = AwsUnreachable, metadata.get("RequestId")
            text = f"{action} failed on AWS's side {tries} times ({code or status})"
            text += f" (request {request_id})" if request_id else ""
            hint, code = "try again later; health.aws.amazon.com shows outages", code or str(status)
        return kind(text, hint, code, resent=resent)

    def _explain_no_answer(self, error: Exception) -> AwsError:
        from botocore import exceptions, parsers

        if reason := self._credentials.explain(error):
            return AwsError(*reason)
        if isinstance(error, exceptions.ParamValidationError):
            return AwsError(f"AWS rejects the request as invalid: {error}".replace("\n", " "))
        no_answer = (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            parsers.ResponseParserError,
            OSError,
        )
        message = str(error).split("\n")[0]
        kind = AwsUnreachable if isinstance(error, no_answer) else AwsError
        if isinstance(error, exceptions.EndpointConnectionError) and not self._calls.may_have_sent:
            kind = AwsNoService
        if kind is AwsError:
            text = f"AWS cannot be asked: {type(error).__name__}: {message}".removesuffix(": ")
            hint = "`aws sts get-caller-identity` shows whether the credentials work"
            return (AwsUnreachable if self._calls.may_have_sent else AwsError)(text, self._region_hint(error) or hint)
        return kind(f"AWS cannot be reached: {message}", self._network_hint(error))

    def _network_hint(self, error: Exception) -> str:
        from botocore import exceptions

        if isinstance(error, exceptions.ProxyConnectionError):
            return network_hint("proxy")
        if isinstance(error, exceptions.SSLError):
            return network_hint("certificate", ("AWS_CA_BUNDLE",))
        return self._region_hint(error) or "check the network, proxies and the region"

    def _region_hint(self, error: Exception) -> str:
        """Return the regions that have nearly this name; "" where there is one of this name."""
        from botocore import exceptions

        if not isinstance(error, exceptions.EndpointConnectionError | exceptions.InvalidRegionError) or self.endpoint:
            return ""
        near = get_close_matches(self.region, _regions(), 2)
        if self.region in _regions() or not near:
            return ""
        meant = f"there is no region {self.region}; did you mean {' or '.join(near)}?"
        return f"{meant} change {self._option('region')} or AWS_REGION"

    def _option(self, name: str) -> str:
        return f"options.{self.backend}.{name}" if self.backend else f"AWS_{name.upper()}"


@cache
def _regions() -> list[str]:
    """Return the regions that the SDK knows; blocking."""
    from botocore.session import Session

    session = Session()
    parts = session.get_available_partitions()
    return [name for part in parts for name in session.get_available_regions("ec2", part)]


def _camel_case(operation: str) -> str:
    return "".join(part.capitalize() for part in operation.split("_"))


class _BoundedSession:
    """A session of botocore that reads no answer of any length; the body of a stream is left to its caller."""

    def __init__(self, session: Any, clock: Clock) -> None:
        self._session, self._clock = session, clock

    def send(self, request: Any) -> Any:
        if request.stream_output:
            return self._session.send(request)
        from botocore.exceptions import HTTPClientError
        from urllib3.exceptions import HTTPError

        request.stream_output = True
        response = self._session.send(request)
        raw = response.raw
        try:
            response._content = read_body(getattr(raw, "read1", raw.read), request.url, self._clock)
        except HTTPError as error:
            raise HTTPClientError(error=error) from None
        if raw.length_remaining:  # what is missing of Content-Length
            raise HTTPClientError(error=f"the answer lacks its last {raw.length_remaining} bytes")
        return response

    def close(self) -> None:
        self._session.close()
