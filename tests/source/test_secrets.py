"""The secret guard: what is refused, what passes, and that nothing of a secret is ever shown."""

from __future__ import annotations

import base64
import importlib
import json
import random
import re
import string
import sysconfig
from pathlib import Path
from uuid import UUID

import pytest

from cloudtrain.errors import BadSource
from cloudtrain.source import secrets
from cloudtrain.source.archive import LINK
from cloudtrain.source.files import list_files
from cloudtrain.source.limits import POINTER
from cloudtrain.source.secrets import Finding

ROOT = Path(__file__).parents[2]

DICE = random.Random(7)
ALNUM = string.ascii_letters + string.digits


def word(length: int, letters: str = ALNUM) -> str:
    return "".join(DICE.choice(letters) for _ in range(length))


def coded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits
# Put together here, so that this file itself is not refused.
CREDENTIALS = secrets.credentials()
EVERY = (*CREDENTIALS.HEADS, *CREDENTIALS.PATTERNS)
PLANTED = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMII" + word(40),
    "private key ": "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n",
    "private key  ": "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\n",
    "key of a Google service account": json.dumps({"private_key": "-----" + "BEGIN PRIVATE KEY-----\nM"}),
    "password in the URL of a package index": "--extra-index-url https://u:" + word(12) + "@idx.example/simple",
    "password in the URL of a package index ": "lib @ git+https://ci:" + word(12) + "@git.example/lib.git",
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
    "Databricks token": "dapi" + word(32, HEX),
    "private key   ": "---- BEGIN SSH2 ENCRYPTED " + "PRIVATE KEY ----",
    "private key    ": "PuTTY-User-" + "Key-File-3: ssh-ed25519",
    "AWS access key  ": "ABIA" + word(16, UPPER),
    "AWS secret access key  ": "aws_session_token: '" + word(40) + "'",
    "GitLab token ": "glrt-" + word(20),
    "GitLab token  ": "GR1348941" + word(20),
    "npm token ": "//registry.example.org/:_authToken=" + str(UUID(int=DICE.getrandbits(128))),
    "JSON web token": ".".join(map(coded, ({"alg": "HS256", "typ": "JWT"}, {"sub": 1}, "signature of some length"))),
    "SendGrid key": "SG." + word(22) + "." + word(43),
    "Square secret": "sq0csp-" + word(43),
    "Twilio key": "SK" + word(32, HEX),
    "Twilio account": "AC" + word(32, HEX),
    "Mailchimp key": word(32, HEX) + "-us12",
    "Telegram bot token": word(9, string.digits) + ":AA" + word(33),
    "Discord bot token": "DISCORD=" + "M" + word(23) + "." + word(6) + "." + word(27),
    "Artifactory key": "AKCp" + word(69),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_secrets_are_found_with_their_line(kind):
    text = "import os\n\nx = 1\n" + PLANTED[kind] + "\nlast line\n"
    assert secrets.search(text.encode()) == [(4, kind.strip())]


def test_every_pattern_is_tested_and_says_where_it_comes_from():
    assert {kind.strip() for kind in PLANTED} == {pattern.kind for pattern in EVERY}
    assert all(pattern.source.startswith("https://") for pattern in EVERY)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", CREDENTIALS.SOURCES_READ)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_needle_is_in_everything_that_a_form_matches(kind):
    planted = PLANTED[kind].encode()
    forms = [pattern for pattern in EVERY if pattern.kind == kind.strip() and re.search(pattern.form, planted)]
    assert forms and all(any(needle in planted for needle in pattern.needles) for pattern in forms)


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
        "--index-url https://${USER}:${TOKEN}@idx.acme.org/simple",
        "pip install --index-url https://user:password@idx.acme.org/simple",
        "--index-url https://idx.acme.org/simple --find-links https://user@idx.acme.org:8080/",
        "",
    ],
)
def test_what_only_looks_alike_passes(harmless):
    assert secrets.search(harmless.encode()) == []


def test_the_standard_library_passes_but_for_its_tests_of_keys():
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in folder.rglob("*.py") if "site-packages" not in path.parts and path.is_file()]
    found = {path.relative_to(folder).as_posix(): secrets.search(path.read_bytes()) for path in files}
    hits = {path for path, seen in found.items() if seen}
    assert len(files) > 300
    assert not [path for path in hits if not re.match(r"(test|idlelib|lib2to3)/", path)]
    assert len(hits) <= 2


def test_this_repository_can_be_packaged():
    files = list_files(ROOT)
    assert len(files) > 150
    found = {file.path: secrets.search((ROOT / file.path).read_bytes()) for file in files if file.mode != LINK}
    assert {path: hits for path, hits in found.items() if hits} == {}
    assert [file.path for file in files if secrets.suspicious_name(file.path)] == []


def test_a_token_is_found_in_a_file_of_any_shape():
    """The lines that are looked at closely are cut out of the file: their numbers are still those of the file."""
    token = PLANTED["GitHub token"]
    for before in (0, 1, 500):
        for end in ("\n", "\r\n", ""):
            lines = [
                f"x = {'a_long_name_of_more_than_20_characters' * (number % 3)}{end or chr(10)}"
                for number in range(before)
            ]
            text = "".join(lines) + f"t={token}{end}" + "y = 1\n" * (end != "")
            assert secrets.search(text.encode()) == [(before + 1, "GitHub token")]
    assert secrets.search(f"{'z' * 3_000_000} {token}".encode()) == [(1, "GitHub token")]


def test_every_form_asks_for_a_run_as_long_as_the_one_looked_for():
    for kind, text in PLANTED.items():
        if kind.strip() in {pattern.kind for pattern in CREDENTIALS.PATTERNS} - {
            pattern.kind for pattern in CREDENTIALS.HEADS
        }:
            assert max(map(len, re.findall(r"[A-Za-z0-9_/+-]+", text))) >= CREDENTIALS.RUN
    shortest = [
        "xoxb-" + "1" * 15,
        "hooks.slack.com/services/" + "Ta/Bb/c",
        "AKIA" + "B" * 16,
        "eyJ" + "a" * 17 + ".eyJ9",
    ]
    assert [len(secrets.search(text.encode())) for text in shortest] == [1] * 4


def test_binary_files_are_not_searched_for_content():
    assert secrets.search(b"\0" + PLANTED["GitHub token"].encode()) == []


def test_a_line_is_reported_once_and_lines_are_counted_as_editors_do():
    both = f"{PLANTED['GitHub token']} {PLANTED['npm token']}\r\n\r\n{PLANTED['Stripe key']}"
    assert secrets.search(both.encode()) == [(1, "GitHub token"), (3, "Stripe key")]


@pytest.mark.parametrize(
    "path",
    [".env", "a/.env.local", ".env.production", ".envrc", "keys/id_rsa", "id_ed25519", "x.p12", "home/.netrc",
     "root/.aws/credentials", ".aws/credentials", ".kube/config", "kubeconfig", "prod.kubeconfig",
     "conf/application_default_credentials.json", ".docker/config.json",
     ".git-credentials", ".pypirc", "kaggle.json", "cache/huggingface/token", "client_secret_1.json", "a.ppk"],
)  # fmt: skip
def test_names_that_are_refused(path):
    assert secrets.suspicious_name(path)


@pytest.mark.parametrize(
    "path",
    ["env.py", "environment.yml", ".env.example", "app/.env.template", ".env.prod.example", "id_rsa.pub", "docs/credentials.md",
     "config", "kube/config", "token", "tokenizer.json", "src/netrc.py", "a.key", "cert.pem", "huggingface/tokenizer"],
)  # fmt: skip
def test_names_that_pass(path):
    assert secrets.suspicious_name(path) == ""


def refused(findings, *allowed) -> BadSource:
    with pytest.raises(BadSource) as caught:
        secrets.refuse(findings, *allowed)
    return caught.value


def test_a_refusal_is_a_count_the_first_places_and_what_to_do():
    findings = [
        Finding("a.py", 3, "GitHub token"),
        Finding("a.py", 9, "npm token"),
        Finding("odd\nname", 0, "private SSH key"),
    ]
    error = refused(findings)
    assert str(error).split("\n  ") == [
        "the source has what looks like credentials in 2 files:",
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
    secrets.refuse(findings, ["a.py"], ["*.bin"])


def test_other_rules_are_another_digest(monkeypatch):
    before = secrets.rules()
    assert before == secrets.rules()
    monkeypatch.setattr(CREDENTIALS, "PATTERNS", CREDENTIALS.PATTERNS[:-1])
    assert secrets.rules() != before


def test_exceptions_are_patterns_as_in_gitignore():
    findings = [Finding("tests/fixtures/a.pem", 1, "private key"), Finding("b.pem", 1, "private key")]
    assert "fixtures" not in str(refused(findings, ["tests/fixtures/"]))
    secrets.refuse(findings, ["*.pem"])
    secrets.refuse([])
    assert "b.pem" in str(refused(findings, ["*.pem", "!/b.pem"]))


# -- detect-secrets as the oracle -------------------------------------------------------------------------------------

# Its detectors of what an issuer has marked as its own. Left out are those that judge by the name of a variable, by
# entropy, or by a form that any word may have (passwords in addresses, Artifactory's encrypted passwords).
DETECTORS = [
    "AWSKeyDetector", "ArtifactoryDetector", "AzureStorageKeyDetector", "DiscordBotTokenDetector", "GitHubTokenDetector",
    "GitLabTokenDetector", "JwtTokenDetector", "MailchimpDetector", "NpmDetector", "OpenAIDetector", "PrivateKeyDetector",
    "PypiTokenDetector", "SendGridDetector", "SlackDetector", "SquareOAuthDetector", "StripeDetector",
    "TelegramBotTokenDetector", "TwilioKeyDetector",
]  # fmt: skip
OTHERS = ["BasicAuthDetector", "CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector",
          "Base64HighEntropyString", "HexHighEntropyString", "KeywordDetector", "IPPublicDetector"]  # fmt: skip


def generated(dice: random.Random) -> dict[str, list[str]]:
    """Return tokens of every kind by the detector that knows it."""

    def any_of(letters: str, least: int, most: int = 0) -> str:
        return "".join(dice.choices(letters, k=dice.randint(least, most or least)))

    web = ALNUM + "_-"
    keys = ["DSA ", "EC ", "OPENSSH ", "RSA ", ""]
    return {
        "AWSKeyDetector": [
            dice.choice(["AKIA", "ASIA", "ABIA", "ACCA", "A3T" + any_of(UPPER, 1)]) + any_of(UPPER, 16),
            dice.choice(["aws", "AWS"])
            + dice.choice(["_secret_", "Secret", " "])
            + dice.choice(["key", "TOKEN", "password"])
            + dice.choice([" = ", ": ", "="])
            + "'"
            + any_of(ALNUM + "/+", 40)
            + "'",
        ],
        "ArtifactoryDetector": [" AKCp" + any_of(ALNUM, 69) + " "],
        "AzureStorageKeyDetector": ["AccountKey=" + any_of(ALNUM + "/+", 86) + "=="],
        "DiscordBotTokenDetector": [
            "discord " + dice.choice("MNO") + any_of(web, 23, 25) + "." + any_of(web, 6) + "." + any_of(web, 27)
        ],
        "GitHubTokenDetector": ["gh" + dice.choice("pousr") + "_" + any_of(ALNUM, 36)],
        "GitLabTokenDetector": [
            dice.choice(["glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "glcbt-", "glcbt-1f_", "GR1348941"])
            + any_of(web, 20, 49)
            + "a",
            "glimt-" + any_of(web, 25),
            "glptt-" + any_of(web, 40),
            "glagent-" + any_of(web, 50, 99),
            "gloas-" + any_of(web, 64),
        ],
        "JwtTokenDetector": [
            ".".join(
                [
                    coded({"alg": "HS256", "kid": any_of(ALNUM, 1, 9)}),
                    coded({"sub": any_of(ALNUM, 1, 30)}),
                    any_of(web, 4 * 11),
                ]
            )
        ],
        "MailchimpDetector": [any_of(HEX, 32) + f"-us{dice.randint(1, 99)}"],
        "NpmDetector": [
            "//registry.npmjs.org/:_authToken="
            + dice.choice(["npm_" + any_of(ALNUM, 36), str(UUID(int=dice.getrandbits(128)))])
        ],
        "OpenAIDetector": [
            "sk-" + dice.choice(["", "proj-", "my-project_1-"]) + any_of(ALNUM, 20) + "T3BlbkFJ" + any_of(ALNUM, 20)
        ],
        "PrivateKeyDetector": [
            # a mark alone, in quotes, holds no key: programs that look for one have it
            "-----" + "BEGIN " + dice.choice(keys) + "PRIVATE KEY-----\\nMII",
            "-----" + "BEGIN PGP " + "PRIVATE KEY BLOCK----- ",
            "---- " + "BEGIN SSH2 ENCRYPTED " + "PRIVATE KEY ----",
            "PuTTY-User-" + "Key-File-2: ssh-rsa",
        ],
        "PypiTokenDetector": [
            "pypi-" + dice.choice(["AgEIcHlwaS5vcmc", "AgENdGVzdC5weXBpLm9yZw"]) + any_of(web, 70, 150)
        ],
        "SendGridDetector": ["SG." + any_of(web, 22) + "." + any_of(web, 43)],
        "SlackDetector": [
            "xox"
            + dice.choice("abposr")
            + "-"
            + any_of(string.digits, 10, 13)
            + "-"
            + any_of(string.digits, 10, 13)
            + "-"
            + any_of(ALNUM, 24),
            "https://hooks.slack.com/services/T"
            + any_of(UPPER, 8, 10)
            + "/B"
            + any_of(UPPER, 8, 10)
            + "/"
            + any_of(ALNUM, 24),
        ],
        "SquareOAuthDetector": ["sq0csp-" + any_of(web, 43)],
        "StripeDetector": [dice.choice("rs") + "k_live_" + any_of(ALNUM, 24)],
        "TelegramBotTokenDetector": [any_of("123456789", 8, 10) + ":AA" + any_of(web, 33)],
        "TwilioKeyDetector": [dice.choice(["AC", "SK"]) + any_of(HEX, 32)],
    }


PLACES = [
    "{}",
    "x = '{}'",
    'token: "{}"',
    "export TOKEN={} # mine",
    '{{"a": 1, "token": "{}", "b": 2}}',
    "\t{}\r",
    "curl -H 'X: {}' https://example.org",
    "({})",
    "- {}",
    "<key>{}</key>",
    "a={}&b=1",
    "Bearer {}",
]


def planted_lines(seed: int, rounds: int) -> list[tuple[str, str]]:
    dice = random.Random(seed)
    lines = []
    for _ in range(rounds):
        for detector, tokens in generated(dice).items():
            lines += [(detector, dice.choice(PLACES).format(token)) for token in tokens]
    return lines


def oracle_finds(name: str, line: str) -> bool:
    plugin = importlib.import_module("detect_secrets.core.plugins.util").get_mapping_from_secret_type_to_class()
    kind = next(kind for kind in plugin.values() if kind.__name__ == name)
    return any(True for _ in kind().analyze_string(line))


def missed(lines: list[tuple[str, str]]) -> tuple[int, list[tuple[str, str]]]:
    """Return how many lines the oracle refuses, and those among them that we do not."""
    agreed = [(name, line) for name, line in lines if oracle_finds(name, line)]
    return len(agreed), [(name, line) for name, line in agreed if not secrets.search(line.encode())]


def test_what_detect_secrets_finds_is_refused():
    lines = planted_lines(1, 40)
    agreed, left = missed(lines)
    assert left == []
    assert agreed > 0.9 * len(lines)  # the corpus is one
    assert {name for name, line in lines} == set(DETECTORS)


@pytest.mark.long
def test_what_detect_secrets_finds_is_refused_at_length():
    agreed, left = missed(planted_lines(2, 2000))
    assert left == [] and agreed > 50_000


def test_no_detector_of_the_oracle_is_forgotten():
    known = importlib.import_module("detect_secrets.core.plugins.util").get_mapping_from_secret_type_to_class().values()
    assert {kind.__name__ for kind in known} == {*DETECTORS, *OTHERS}
