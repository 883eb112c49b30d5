"""What the API server refuses is quoted in its own words; advice on permissions is given where RBAC alone has refused."""

from __future__ import annotations

import json

import pytest

from cloudtrain.backends.http import Answer
from cloudtrain.backends.kubernetes.client import error_for_answer
from cloudtrain.errors import NoCapacity, Unreachable

ROLE = "`cloudtrain permissions -t TARGET` prints the role that you need"
WEBHOOK = 'Internal error occurred: failed calling webhook "a.acme.com": failed to call webhook: Post "https://a/": dial tcp: '
# What a server has answered: status, its words, our hint, and whether the call may be repeated or needs other machines.
# The words are those of k8s.io/apiserver: pkg/admission, pkg/endpoints/handlers/responsewriters.
ANSWERS = [
    (403, 'jobs.batch is forbidden: User "ada" cannot create resource "jobs" in API group "batch"', ROLE, None),
    (403, 'jobs.batch "x" is forbidden: User "ada" cannot get resource "jobs" in API group "batch"', ROLE, None),
    (403, 'users "boss" is forbidden: User "ada" cannot impersonate resource "users" at the cluster scope', "", None),
    (403, 'admission webhook "v.kyverno.svc-fail" denied the request: label team is required: ask in #platform', "", None),
    (400, 'admission webhook "v.kyverno.svc-fail" denied the request: label team is required: ask in #platform', "", None),
    (403, 'admission webhook "w" denied the request: User "ada" cannot use resource "gpus" on Fridays', "", None),
    (422, "jobs.batch \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no team", "", None),
    (403, 'pods "x" is forbidden: maximum cpu usage per Container is 4, but limit is 8', "", None),
    (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true', "", None),
    (403, 'jobs.batch "x" is forbidden: unable to create new content in namespace ml because it is being terminated', "", None),
    (403, 'jobs.batch "x" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, used: 9, limited: 9',
     "see: kubectl describe quota", NoCapacity),
    (500, WEBHOOK + "connect: connection refused", "a webhook of the cluster does not answer", Unreachable),
    (500, WEBHOOK + "i/o timeout", "a webhook of the cluster does not answer", Unreachable),
    (500, "Internal error occurred: etcdserver: request timed out", "try again", Unreachable),
]  # fmt: skip


@pytest.mark.parametrize(("status", "words", "hint", "kind"), ANSWERS)
def test_a_refusal_is_quoted(status: int, words: str, hint: str, kind: type[Exception] | None) -> None:
    body = json.dumps({"kind": "Status", "message": words, "code": status}).encode()
    error = error_for_answer(Answer(status, {}, body), "the Job was not accepted")
    assert words in error.message and error.message.startswith("the Job was not accepted: ")
    assert error.hint.startswith(hint) and bool(error.hint) is bool(hint)
    assert ("permission" in f"{error.message} {error.hint}") is (hint == ROLE)
    assert isinstance(error, kind or type(error)) and isinstance(error, NoCapacity | Unreachable) is bool(kind)
