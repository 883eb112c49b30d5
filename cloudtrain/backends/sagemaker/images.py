"""The default container image on SageMaker: Hugging Face's newest training image, for jobs with a script but no `image`.

Copied 2026-11-21 from sagemaker 2.257.7 (image_uri_config/huggingface.json); a test compares both. These images are for
GPUs only, and that SDK adds no newer ones: set `image` for a newer one.
"""

from __future__ import annotations

# transformers, torch, tag
NEWEST = ("4.56.2", "2.8.0", "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04")
REPOSITORY = "huggingface-pytorch-training"
_MOST = "763104351884"
_IN_MOST = """ap-northeast-1 ap-northeast-2 ap-south-1 ap-southeast-1 ap-southeast-2 ca-central-1 eu-central-1 eu-north-1
eu-west-1 eu-west-2 eu-west-3 sa-east-1 us-east-1 us-east-2 us-west-1 us-west-2"""
REGISTRIES = dict.fromkeys(_IN_MOST.split(), _MOST) | {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-northeast-3": "364406365360",
    "ap-southeast-3": "907027046896",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-south-1": "692866216735",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
    "us-iso-east-1": "886529160074",
    "us-isob-east-1": "094389454867",
}
_SUFFIXES = {"cn": "amazonaws.com.cn", "us-iso": "c2s.ic.gov", "us-isob": "sc2s.sgov.gov"}


def default_image(region: str) -> str | None:
    """Return the URI of Hugging Face's newest training image in a region, None if the region has none."""
    account = REGISTRIES.get(region)
    if account is None:
        return None
    suffix = _SUFFIXES.get(region.rsplit("-", 2)[0], "amazonaws.com")
    return f"{account}.dkr.ecr.{region}.{suffix}/{REPOSITORY}:{NEWEST[2]}"
