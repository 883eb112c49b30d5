"""Find AWS credentials without a prompt that the user does not expect, and say why there are none and which command helps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

CACHE = Path(".aws") / "cli" / "cache"  # of the AWS CLI, below the home: credentials of roles, for as long as they hold
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
_INVALID = {
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    "InvalidSignatureException",
}
_SKEWED = ("Signature expired", "Signature not yet current", "RequestTimeTooSkewed")
_KEYS = "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN"


class CodeNeeded(Exception):
    """A profile asks for a code of a device (MFA), and this process may not ask the user."""


class _RoleCache(dict[str, Any]):
    """Credentials of roles in files, and in memory where a file cannot be written or read."""

    def __init__(self, files: MutableMapping[str, Any]) -> None:
        super().__init__()
        self._files = files

    def __missing__(self, key: str) -> Any:
        return self._files[key]

    def __contains__(self, key: object) -> bool:
        with suppress(KeyError):
            return self[str(key)] is not None
        return False

    def __setitem__(self, key: str, value: Any) -> None:
        try:
            self._files[key] = value
        except OSError:
            super().__setitem__(key, value)
        else:
            self.pop(key, None)


class Credentials:
    """The credentials of a profile; None is the profile that AWS_PROFILE names, or the keys of the environment.

    Args:
        profile: Name in ~/.aws/config.
        option: The option that names the profile, for hints.
    """

    def __init__(self, profile: str | None, option: str) -> None:
        self._profile, self._option = profile, option
        self._session: Any = None
        self._may_ask = False

    def make_session(self, region: str | None) -> Any:
        """Return a boto3 session; raises botocore's errors.

        Credentials of a profile that asks for a code are read from the AWS CLI's cache and kept there, as the CLI does: a
        code that was typed once also holds in the background. Those of other roles are kept in memory.
        """
        import boto3
        from botocore.credentials import JSONFileCache

        self._session = boto3.Session(profile_name=self._profile, region_name=region)
        roles = self._session._session.get_component("credential_provider").get_provider("assume-role")
        roles._prompter = self._ask
        if self._asks_for_code():
            with suppress(RuntimeError):  # this user has no home folder
                roles.cache = _RoleCache(JSONFileCache(str(Path.home() / CACHE)))
        return self._session

    def _asks_for_code(self) -> bool:
        """Whether the profile, or one that its role comes from, names a device for codes."""
        session = self._session._session
        profiles = dict(session.full_config["profiles"])
        name = session.profile or "default"
        while profile := profiles.pop(name, None):
            if "mfa_serial" in profile:
                return True
            name = profile.get("source_profile")
        return False

    def obtain(self, session: Any) -> bool:
        """Obtain the credentials of a boto3 session; False where there are none. It alone may ask the user for a code. Blocking.

        Raises botocore's errors, and whatever else a credential chain raises.
        """
        self._may_ask = True
        try:
            found = session.get_credentials()
            return found is not None and found.get_frozen_credentials() is not None
        finally:
            self._may_ask = False

    def _ask(self, prompt: str) -> str:
        if not (self._may_ask and sys.stdin and sys.stdin.isatty()):
            raise CodeNeeded
        from getpass import getpass

        return getpass(prompt)

    # -- what is wrong -------------------------------------------------------------------------------------------------

    @property
    def hint(self) -> str:
        """What to do where there are no credentials."""
        names = " or ".join(sorted({"AWS_PROFILE", self._option}))
        return f"set {names}; run `aws sso login` or `aws configure` to get credentials"

    def explain_refusal(self, code: str, message: str) -> tuple[str, str] | None:
        """Return what is wrong with the credentials that AWS refused, and what to do; None for any other refusal."""
        if code in _SKEWED or (code in _INVALID and message.startswith(_SKEWED)):
            return (
                f"AWS does not accept the time of this machine's clock: {message or code}",
                "timedatectl set-ntp true",
            )
        if code in _EXPIRED:
            return self._explain_expired()
        if code in _INVALID:
            return f"AWS does not accept the credentials ({code})", self.hint
        if "assume role" in message.lower():
            hint = "`cloudtrain doctor TARGET --policy trust` prints the trust policy that the role needs"
            return f"SageMaker cannot assume the role: {message}", hint
        return None

    def _explain_expired(self) -> tuple[str, str]:
        method = ""
        with suppress(Exception):  # they were obtained before, else another sentence says why not
            method = self._session.get_credentials().method
        if method == "env":
            return "the AWS credentials of the environment have expired", f"unset {_KEYS}, or export new ones"
        if method in ("shared-credentials-file", "config-file"):
            return f"the credentials of {self._name} have expired", self._command("aws configure")
        if method == "login":
            return f"the login of {self._name} has expired", self._command("aws login")
        return "the AWS credentials have expired", self._command("aws sso login")

    def explain(self, error: Exception) -> tuple[str, str] | None:
        """Return why no credentials were obtained, and what to do; None where an error is not about credentials."""
        names = [kind.__name__ for kind in type(error).__mro__]
        text = str(error).strip().partition("\n")[0][:300]
        if {"NoCredentialsError", "PartialCredentialsError"} & {*names}:
            return "there are no AWS credentials", self.hint
        if {"CodeNeeded", "RefreshWithMFAUnsupportedError"} & {*names}:
            command = self._command("aws sts get-caller-identity")
            return (
                f"{self._name} asks for a code (MFA), and this command does not ask for one",
                f"type it once: {command}",
            )
        if "SSOTokenLoadError" in names:
            return f"{self._name} has no login", self._command("aws sso login")
        if {"UnauthorizedSSOTokenError", "TokenRetrievalError", "NoAuthTokenError"} & {*names}:
            return f"the login of {self._name} has expired", self._command("aws sso login")
        if "LoginError" in names:
            return f"the login of {self._name} cannot be used: {text}", self._command("aws login")
        if "CredentialRetrievalError" in names:
            given: Mapping[str, Any] = getattr(error, "kwargs", {})
            why = str(given.get("error_msg") or text).strip().partition("\n")[0][:300]
            if given.get("provider") == "custom-process":
                command = self._command("aws configure get credential_process")
                return f"credential_process of {self._name} failed: {why}", f"run what this prints: {command}"
            return f"{self._name} gives no credentials ({given.get('provider')}): {why}", self.hint
        if "ProfileNotFound" in names:
            near = get_close_matches(str(self._profile), self._profiles(), 1)
            hint = (
                f"did you mean {near[0]}? change {self._option}"
                if near
                else f"aws configure list-profiles; {self._option}"
            )
            return f"there is no AWS profile {self._profile or text}", hint
        if {"InvalidConfigError", "ConfigParseError", "UnknownCredentialError", "InfiniteLoopConfigError"} & {*names}:
            return f"the AWS configuration cannot be used: {text}", f"correct ~/.aws/config, or change {self._option}"
        if isinstance(error, OSError) and error.filename is not None:
            what = f"a file or program that {self._name} needs cannot be used"
            return f"{what}: {error.strerror}: {error.filename}", f"correct ~/.aws/config, or change {self._option}"
        return None

    @property
    def _name(self) -> str:
        return f"the AWS profile {self._profile}" if self._profile else "the AWS profile"

    def _command(self, command: str) -> str:
        return f"{command} --profile {self._profile}" if self._profile else command

    def _profiles(self) -> list[str]:
        import botocore.session

        return list(botocore.session.Session().available_profiles)
