"""The secret guard: what is refused, what passes, and that nothing of a secret is ever shown."""

from __future__ import annotations

import json
import random
import re
import string
import sysconfig
from pathlib import Path

import pytest

from cloudtrain import guard
from cloudtrain.errors import BadSource
from cloudtrain.guard import Finding
from cloudtrain.sizes import POINTER

DICE = random.Random(7)
ALNUM = string.ascii_letters + string.digits


def word(length: int, letters: str = ALNUM) -> str:
    return "".join(DICE.choice(letters) for _ in range(length))


UPPER = string.ascii_uppercase + string.digits
# Put together here, so that this file itself is not refused.
PLANTED = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMII" + word(40),
    "private key ": "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n",
    "private key  ": "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\n",
    "key of a Google service account": json.dumps({"private_key": "-----" + "BEGIN PRIVATE KEY-----\nM"}),
    "AWS access key": "AKIA" + word(16, UPPER),
    "AWS access key ": "key = 'ASIA" + word(16, UPPER) + "'",
    "AWS secret access key": "aws_secret_access_key = " + word(40),
    "AWS secret access key ": '"SecretAccessKey": "' + word(39) + '/"',
    "GitHub token": "ghp_" + word(36),
    "GitHub token ": "https://x:gho_" + word(36) + "@github.com/a/b",
    "GitHub token  ": "github_pat_" + word(22) + "_" + word(59),
    "GitLab token": "glpat-" + word(20),
    "Hugging Face token": "HF_TOKEN=hf_" + word(34),
    "OpenAI or Anthropic key": "sk-" + word(20) + "T3BlbkFJ" + word(20),
    "OpenAI or Anthropic key ": "sk-proj-" + word(30) + "_" + word(40) + "1" + word(20),
    "OpenAI or Anthropic key  ": "sk-ant-api03-" + word(60) + "-" + word(30) + "AA",
    "Google API key": "AIza" + word(35),
    "Slack token": "xoxb-" + word(12, string.digits) + "-" + word(12, string.digits) + "-" + word(24),
    "Slack webhook": "https://hooks.slack.com/services/T" + word(8, UPPER) + "/B" + word(8, UPPER) + "/" + word(24),
    "Azure storage key": "AccountName=a;AccountKey=" + word(86) + "==;",
    "npm token": "//registry.npmjs.org/:_authToken=npm_" + word(36),
    "PyPI token": "pypi-AgEIcHlwaS5vcmc" + word(80),
    "Stripe key": "sk_live_" + word(24),
    "Databricks token": "dapi" + word(32, "0123456789abcdef"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_secrets_are_found_with_their_line(kind):
    text = "import os\n\nx = 1\n" + PLANTED[kind] + "\nlast line\n"
    assert guard.search(text.encode()) == [(4, kind.strip())]


def test_every_pattern_is_tested_and_says_where_it_comes_from():
    assert {kind.strip() for kind in PLANTED} == {pattern.kind for pattern in guard.PATTERNS}
    assert all(pattern.source.startswith("https://") for pattern in guard.PATTERNS)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", guard.SOURCES_READ)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_needle_is_in_everything_that_a_form_matches(kind):
    pattern = next(pattern for pattern in guard.PATTERNS if pattern.kind == kind.strip())
    assert any(needle in PLANTED[kind].encode() for needle in pattern.needles)


@pytest.mark.parametrize(
    "harmless",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "from huggingface_hub import hf_hub_download_of_something_very_long_indeed",
        "token = 'ghp_' + rest",
        'MARK = "-----BEGIN RSA PRIVATE KEY-----"',
        "-----BEGIN PUBLIC KEY-----\nMIIB",
        "-----BEGIN CERTIFICATE-----\nMIIB",
        "<div class='sk-toggleable__content sk-estimator-doc-link'>",
        "task-aaaaaaaaaaaaaaaaaaaaaaaaaaaa1",
        "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "os.environ['AWS_SECRET_ACCESS_KEY']",
        "",
    ],
)
def test_what_only_looks_alike_passes(harmless):
    assert guard.search(harmless.encode()) == []


def test_the_standard_library_and_our_own_files_pass():
    folders = [Path(sysconfig.get_path("stdlib")), *(Path(__file__).parents[1] / name for name in ("cloudtrain", "entrypoints"))]
    folders.append(Path(__file__))
    files = [path for folder in folders for path in (folder.rglob("*.py") if folder.is_dir() else [folder])
             if "site-packages" not in path.parts and path.is_file()]  # fmt: skip
    found = {str(path): guard.search(path.read_bytes()) for path in files}
    assert len(files) > 300
    assert {path: hits for path, hits in found.items() if hits and "/test/" not in path} == {}


def test_binary_files_are_not_searched_for_content():
    assert guard.search(b"\0" + PLANTED["GitHub token"].encode()) == []


def test_a_line_is_reported_once_and_lines_are_counted_as_editors_do():
    both = f"{PLANTED['GitHub token']} {PLANTED['npm token']}\r\n\r\n{PLANTED['Stripe key']}"
    assert guard.search(both.encode()) == [(1, "GitHub token"), (3, "Stripe key")]


@pytest.mark.parametrize(
    "path",
    [".env", "a/.env.local", ".env.production", ".envrc", "keys/id_rsa", "id_ed25519", "x.p12", "home/.netrc",
     "root/.aws/credentials", ".aws/credentials", ".kube/config", "kubeconfig", "prod.kubeconfig",
     "conf/application_default_credentials.json", ".docker/config.json",
     ".git-credentials", ".pypirc", "kaggle.json", "cache/huggingface/token", "client_secret_1.json", "a.ppk"],
)  # fmt: skip
def test_names_that_are_refused(path):
    assert guard.suspicious_name(path)


@pytest.mark.parametrize(
    "path",
    ["env.py", "environment.yml", ".env.example", "app/.env.template", ".env.prod.example", "id_rsa.pub", "docs/credentials.md",
     "config", "kube/config", "token", "tokenizer.json", "src/netrc.py", "a.key", "cert.pem", "huggingface/tokenizer"],
)  # fmt: skip
def test_names_that_pass(path):
    assert guard.suspicious_name(path) == ""


def refused(findings, *allowed) -> BadSource:
    with pytest.raises(BadSource) as caught:
        guard.refuse(findings, *allowed)
    return caught.value


def test_a_refusal_is_a_count_the_first_places_and_what_to_do():
    findings = [Finding("a.py", 3, "GitHub token"), Finding("a.py", 9, "npm token"), Finding("odd\nname", 0, "private SSH key")]
    error = refused(findings)
    assert str(error).split("\n  ") == [
        "the source holds what looks like credentials in 2 files:",
        "a.py:3  GitHub token",
        "a.py:9  npm token",
        "'odd\\nname'  private SSH key (by its name)",
    ]
    assert "allow_secrets" in error.hint and ".cloudtrainignore" in error.hint and "secrets:" in error.hint
    lines = str(refused([Finding(f"f{number:02}", 1, "GitHub token") for number in range(40)])).splitlines()
    assert "in 40 files" in lines[0] and len(lines) == 22 and lines[-1] == "  and 20 more"


def test_pointers_are_told_apart_and_together_with_credentials():
    findings = [Finding("a.py", 3, "npm token"), Finding("w.bin", 1, POINTER)]
    error = refused(findings)
    assert "credentials in 1 file:\n  a.py:3  npm token\nand Git-LFS pointers" in str(error)
    assert "w.bin:1  Git-LFS pointer" in str(error) and "git lfs pull" in error.hint and "allow_secrets" in error.hint
    alone = refused(findings, ["a.py"])
    assert "credentials" not in str(alone) and "allow_secrets" not in alone.hint
    assert "w.bin" in str(refused(findings, ["*"])) and "w.bin" not in str(refused(findings, [], ["*"]))
    guard.refuse(findings, ["a.py"], ["*.bin"])


def test_other_rules_are_another_digest(monkeypatch):
    before = guard.rules()
    assert before == guard.rules()
    monkeypatch.setattr(guard, "PATTERNS", guard.PATTERNS[:-1])
    assert guard.rules() != before


def test_exceptions_are_patterns_as_in_gitignore():
    findings = [Finding("tests/fixtures/a.pem", 1, "private key"), Finding("b.pem", 1, "private key")]
    assert "fixtures" not in str(refused(findings, ["tests/fixtures/"]))
    guard.refuse(findings, ["*.pem"])
    guard.refuse([])
    assert "b.pem" in str(refused(findings, ["*.pem", "!/b.pem"]))
