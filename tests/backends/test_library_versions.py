"""The versions that names of stock images say."""

from __future__ import annotations

import pytest

from cloudtrain.backends import images
from cloudtrain.backends.sagemaker import machine as stock

AWS = "763104351884.dkr.ecr.us-east-1.amazonaws.com/"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (AWS + "huggingface-pytorch-training:2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04",
         {"torch": "2.8.0", "transformers": "4.56.2"}),
        (AWS + "pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker", {"torch": "2.8.0"}),
        ("us-docker.pkg.dev/deeplearning-platform-release/gcr.io/"
         "huggingface-pytorch-training-cu121.2-3.transformers.4-42.ubuntu2204.py310",
         {"torch": "2.3", "transformers": "4.42"}),
        ("example.org/team/train:2.8.0", {}),
        (AWS + "train@sha256:" + "0" * 64, {}),
    ],
)  # fmt: skip
def test_versions_of_an_image(image: str, expected: dict):
    assert images.library_versions(image) == expected


def test_the_default_image_of_sagemaker_says_its_own():
    assert images.library_versions(stock.default_image("us-east-1")) == {
        "torch": stock.NEWEST[1],
        "transformers": stock.NEWEST[0],
    }
