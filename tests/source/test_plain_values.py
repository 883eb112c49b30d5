"""Passwords in URLs and values under a secret's name are recognised; settings pass."""

from __future__ import annotations

import pytest

from cloudtrain.source.secrets import named_value, url_password


@pytest.mark.parametrize("text", ["https://u:" + "T0K3N@idx.acme.org/simple", "postgres://:" + "s3cr3t@db/runs"])
def test_a_password_in_a_url_is_a_credential(text):
    assert url_password(f"URL={text}") == "a password in a URL"


@pytest.mark.parametrize(
    "text",
    ["https://idx.acme.org:8080/a@b", "https://u@idx.acme.org", "https://u:${TOKEN}@a.org", "http://u:****@a.org",
     "https://user:password@a.org", "tcp://10.0.0.1:29500", "git@github.com:a/b", "env:NAME"],
)  # fmt: skip
def test_other_urls_pass(text):
    assert url_password(text) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("ACME_TOKEN", "TOK3Nsecret99xyz" + "ABCDEFGH"), ("WANDB_API_KEY", "0123456789abcdef" * 2),
     ("DB_PASSWORD", "hunter" + "2!x9"),
     ("client_secret", "aZ81-kd92_" + "Qp10zz77")],
)  # fmt: skip
def test_a_value_under_the_name_of_a_secret_is_a_credential(name, value):
    assert named_value(name, value) == f"a value under the name {name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("USE_TOKEN", "true"), ("MAX_TOKEN", "0"), ("PAD_TOKEN", "<|endoftext|>"), ("EOS_TOKEN", "</s>"), ("MASK_TOKEN", "[MASK]"),
     ("HF_TOKEN", "/run/secrets/hf_token_1"), ("SORT_KEY", "abcdefgh12345678ijk"), ("ACME_TOKEN", "my-token-is-set-later-1"),
     ("TOKENIZERS_PARALLELISM", "false"), ("MODEL_TOKENS", "abcdefgh12345678ijk"), ("API_KEY", "xxxxxxxxxxxxxxxxxxxx1"),
     ("ACME_TOKEN", "env:ACME_TOKEN_NUMBER_1"), ("DB_PASSWORD", "none"), ("API_KEY", "not-needed-by-vllm")],
)  # fmt: skip
def test_settings_pass(name, value):
    assert named_value(name, value) == ""
