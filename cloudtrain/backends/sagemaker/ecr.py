"""ECR, AWS's registry of container images: which image a tag stands for now."""

from __future__ import annotations

import re

from cloudtrain.backends import images
from cloudtrain.backends.aws import Aws, AwsError

_REGISTRY = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?", re.ASCII)
_GONE = {"RepositoryNotFoundException", "ImageNotFoundException"}
# What those say who pull an image. Without them ECR may answer with another manifest that it made of the tag's own.
_MANIFESTS = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
]


def exact(aws: Aws, name: str) -> str:
    """Return an image's name with the digest that its tag stands for now, one with a digest as it is; blocking.

    "" where nobody can be asked: another registry, another region, no such tag. Raises AwsError where it is denied.
    """
    asked = images.reference(name)
    registry = _REGISTRY.fullmatch(asked.registry)
    if "@" in name or registry is None or registry["region"] != aws.region:
        return images.exact(name)
    try:
        answer = aws.ask(
            "ecr",
            "batch_get_image",
            registryId=registry["account"],
            repositoryName=asked.name,
            imageIds=[{"imageTag": asked.tag}],
            acceptedMediaTypes=_MANIFESTS,
        )
    except AwsError as error:
        if error.code in _GONE:
            return ""
        raise
    digests = [str(image["imageId"].get("imageDigest") or "") for image in answer.get("images") or ()]
    return images.with_digest(name, digests[0]) if digests else ""
