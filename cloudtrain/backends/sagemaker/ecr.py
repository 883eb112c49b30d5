"""ECR, AWS's container registry: the digest of an image tag, a login and repository to push to."""

from __future__ import annotations

import base64
import re

from cloudtrain.backends import images
from cloudtrain.backends.aws import Aws, AwsError

REGISTRY = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?", re.ASCII)
_GONE = {"RepositoryNotFoundException", "ImageNotFoundException"}
# What container runtimes accept when they pull. Without it ECR may convert the manifest, which changes the digest.
_MANIFESTS = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
]


def resolve_digest(aws: Aws, name: str) -> str:
    """Return an image's name with the digest that its tag stands for now; blocking.

    A name with a digest is returned as it is. Returns "" for another registry or region and for a tag that does not
    exist. Raises AwsError where access is denied.
    """
    reference = images.parse_reference(name)
    registry = REGISTRY.fullmatch(reference.registry)
    if "@" in name or registry is None or registry["region"] != aws.region:
        return images.pinned_image(name)
    try:
        answer = aws.call(
            "ecr",
            "batch_get_image",
            registryId=registry["account"],
            repositoryName=reference.name,
            imageIds=[{"imageTag": reference.tag}],
            acceptedMediaTypes=_MANIFESTS,
        )
    except AwsError as error:
        if error.code in _GONE:
            return ""
        raise
    digests = [str(image["imageId"].get("imageDigest") or "") for image in answer.get("images") or ()]
    return images.with_digest(name, digests[0]) if digests else ""


def prepare_push(aws: Aws, repository: str) -> images.ImageRegistry:
    """Return the account's registry with a login that is valid for 12 hours; creates the repository if it does not exist.

    Blocking. The token is base64 of AWS:PASSWORD
    (https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_AuthorizationData.html, 2026-11-25). Raises AwsError.
    """
    try:
        aws.call("ecr", "describe_repositories", repositoryNames=[repository])
    except AwsError as error:
        if error.code != "RepositoryNotFoundException":
            raise
        aws.call("ecr", "create_repository", repositoryName=repository)
    (granted,) = aws.call("ecr", "get_authorization_token")["authorizationData"]
    user, _, password = base64.b64decode(granted["authorizationToken"]).decode().partition(":")
    return images.ImageRegistry(str(granted["proxyEndpoint"]).partition("://")[2], user, password)
