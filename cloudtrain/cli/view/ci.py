"""The CI file that `cloudtrain init --ci` writes: a plan for each change, a run for each commit on main.

No key is stored: GitHub's or GitLab's identity token takes a role of AWS, or an account of Google. Actions are pinned to
commits (2026-11-25), each with its version behind it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

PATHS = {"github": ".github/workflows/cloudtrain.yml", "gitlab": ".gitlab-ci.yml"}
CHECKOUT = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2"
PYTHON = "actions/setup-python@a309ff8b426b58ec0e2a45f0f869d46889d02405 # v6.2.0"
UPLOAD = "actions/upload-artifact@043fb46d1a93c77aae656e7c1c64a875d1fc6a0a # v7.0.1"
AWS = "aws-actions/configure-aws-credentials@e6de054238d6b7531b4efff3b6587d9aade6a06c # v6.2.3"
GOOGLE = "google-github-actions/auth@7c6bc770dae815cd3e89ee6cdf493a5fab2cc093 # v3.0.0"
CLIENTS = {"sagemaker": "boto3", "vertex": "google-auth", "kubernetes": "", "slurm": "asyncssh", "ssh": "asyncssh"}


@dataclass(frozen=True)
class Place:
    """What a CI file says of the target: its backend, and where its account is."""

    backend: str
    account: str = ""
    region: str = ""
    project: str = ""
    server: str = ""  # of a Kubernetes cluster
    context: str = ""  # that the target names
    wheel: str = ""  # what pip installs as cloudtrain
    pinned_policy: bool = False  # an organisation's policy, which doctor fetches

    @property
    def role(self) -> str:
        return f"arn:aws:iam::{self.account or 'ACCOUNT'}:role/cloudtrain-ci"

    @property
    def packages(self) -> str:
        named = '"${CLOUDTRAIN:?write the address of your wheel into the CI file}"'
        return f"{named} {CLIENTS.get(self.backend, '')}".rstrip()


# Prints the identity of a GitHub job as a credential of Kubernetes: GitHub's tokens live some minutes, a training longer.
IDENTITY = """\
import base64, datetime, json, os, urllib.request
url = os.environ["ACTIONS_ID_TOKEN_REQUEST_URL"] + "&audience=kubernetes"
headers = {"Authorization": "bearer " + os.environ["ACTIONS_ID_TOKEN_REQUEST_TOKEN"]}
with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
    token = json.load(answer)["value"]
claims = token.split(".")[1]
end = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"]
until = datetime.datetime.fromtimestamp(end, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
status = {"token": token, "expirationTimestamp": until}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


def kubeconfig(place: Place, user: str) -> str:
    """Return a kubeconfig for the cluster of a target; `user` is the user's entry as JSON."""
    name = place.context or "cluster"
    entries = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": "SERVER", "certificate-authority-data": "AUTHORITY"}}],
        "users": [{"name": name, "user": json.loads(user)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    text = json.dumps(entries)
    return text.replace('"SERVER"', '"$CLUSTER_SERVER"').replace('"AUTHORITY"', '"$CLUSTER_AUTHORITY"')


def kubeconfig_commands(place: Place, system: str) -> list[str]:
    """Return the commands that write a kubeconfig, with the job's identity token as the credential."""
    user: dict[str, object] = {"tokenFile": "HOME/.kube/identity-token"}
    write = ["""printf %s "$IDENTITY_TOKEN" > "$HOME/.kube/identity-token\""""]
    if system == "github":
        plugin = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "python3",
            "args": ["HOME/.kube/identity.py"],
            "interactiveMode": "Never",
        }
        user = {"exec": plugin}
        write = ["""cat > "$HOME/.kube/identity.py" <<'END'""", *IDENTITY.splitlines(), "END"]
    text = kubeconfig(place, json.dumps(user)).replace('"HOME/', '"$HOME/')
    return ["(", "umask 077", 'mkdir -p "$HOME/.kube"', *write, 'cat > "$HOME/.kube/config" <<END', text, "END", ")"]


def build(system: str, job: str, place: Place, branch: str = "main") -> str:
    """Return the file for "github" or "gitlab"; `job` is the job file's path in the repository."""
    return (_github if system == "github" else _gitlab)(job, place, branch)


def compare_commands(job: str, place: Place, base: str) -> list[str]:
    """Return the commands that plan a change and the branch that it is for, and print what differs."""
    rules = ["cloudtrain doctor local > rules.txt || { cat rules.txt; exit 1; }"] * place.pinned_policy
    return [
        *rules,
        f'git worktree add --detach "$RUNNER_FOLDER/base" "origin/{base}"',
        f'cloudtrain plan {job} -o "$RUNNER_FOLDER/plan.json"',
        f'(cd "$RUNNER_FOLDER/base" && cloudtrain plan {job} -o "$RUNNER_FOLDER/base.json") || echo "no plan of the base"',
        'if [ -f "$RUNNER_FOLDER/base.json" ]; then',
        '  cloudtrain diff "$RUNNER_FOLDER/base.json" "$RUNNER_FOLDER/plan.json" | tee "$RUNNER_FOLDER/difference.txt"',
        "fi",
    ]


def submit_command(job: str) -> str:
    """Return the command that trains; the same commit is the same run."""
    return f'exec cloudtrain submit {job} --wait --yes --key "$COMMIT" --on-interrupt cancel'


def _github(job: str, place: Place, branch: str) -> str:
    auth = ""
    if place.backend == "sagemaker":
        account = f'\n          allowed-account-ids: "{place.account}"' if place.account else ""
        auth = f"""
      - uses: {AWS}
        with:
          role-to-assume: {place.role}
          aws-region: {place.region or "us-east-1"}
          role-duration-seconds: 21600{account}"""
    elif place.backend == "vertex":
        provider = "projects/NUMBER/locations/global/workloadIdentityPools/ci/providers/github"
        auth = f"""
      - uses: {GOOGLE}
        with:
          project_id: {place.project or "PROJECT"}
          workload_identity_provider: {provider}"""
    elif place.backend == "kubernetes":
        auth = f"""
      - name: Log in to the cluster
        env:
          CLUSTER_SERVER: {json.dumps(place.server or "https://SERVER")}
          CLUSTER_AUTHORITY: AUTHORITY   # the base64 text certificate-authority-data of your kubeconfig
        run: |
{_indent(kubeconfig_commands(place, "github"), 10)}"""
    compare = _indent(compare_commands(job, place, "$BASE"), 10)
    rules = "\n      - run: cloudtrain doctor local" if place.pinned_policy else ""
    identity = ", id-token: write" if auth else ""
    return f"""\
# Written by `cloudtrain init --ci github`: a plan for each pull request, a run for each commit on {branch}.
name: cloudtrain
on:
  pull_request:
  push:
    branches: [{branch}]
permissions: {{}}
concurrency:
  group: cloudtrain-${{{{ github.event_name == 'pull_request' && github.ref || github.sha }}}}   # each commit of {branch} runs
  cancel-in-progress: ${{{{ github.event_name == 'pull_request' }}}}
env:
  CLOUDTRAIN: {_wheel(place)}   # what pip installs: the address of your wheel, or name==version of your index
jobs:
  plan:
    if: github.event_name == 'pull_request'
    runs-on: ubuntu-latest
    timeout-minutes: 15
    permissions: {{contents: read}}
    steps:
      - uses: {CHECKOUT}
        with: {{fetch-depth: 0, persist-credentials: false}}
      - uses: {PYTHON}
        with: {{python-version: "3.12"}}
      - run: pip install {place.packages}
      - name: Plan
        env:
          BASE: ${{{{ github.base_ref }}}}
          RUNNER_FOLDER: ${{{{ runner.temp }}}}
        run: |
{compare}
          {{ echo '```'; cat "$RUNNER_FOLDER/difference.txt"; echo '```'; }} >> "$GITHUB_STEP_SUMMARY" || true
      - uses: {UPLOAD}
        with:
          name: plan
          path: ${{{{ runner.temp }}}}/plan.json
  train:
    if: github.event_name == 'push'
    runs-on: ubuntu-latest
    timeout-minutes: 360
    permissions: {{contents: read{identity}}}
    env:
      COMMIT: ${{{{ github.sha }}}}
    steps:
      - uses: {CHECKOUT}
        with: {{persist-credentials: false}}
      - uses: {PYTHON}
        with: {{python-version: "3.12"}}
      - run: pip install {place.packages} plotly{auth}{rules}
      - name: Train
        run: {submit_command(job)}
      - name: Cancel
        if: cancelled()
        run: cloudtrain cancel --key "$COMMIT"
      - name: Report
        if: always()
        run: cloudtrain report -o "$RUNNER_TEMP/report.html"
      - uses: {UPLOAD}
        if: always()
        with: {{name: report, path: "${{{{ runner.temp }}}}/report.html"}}
"""


def _gitlab(job: str, place: Place, branch: str) -> str:
    tokens, variables, before = "", "", ""
    if place.backend == "sagemaker":
        tokens = "\n  id_tokens:\n    IDENTITY_TOKEN: {aud: https://gitlab.com}"
        variables = f"""
    AWS_ROLE_ARN: {place.role}
    AWS_DEFAULT_REGION: {place.region or "us-east-1"}
    AWS_WEB_IDENTITY_TOKEN_FILE: /tmp/identity-token"""
        before = """
    - (umask 077; printf %s "$IDENTITY_TOKEN" > "$AWS_WEB_IDENTITY_TOKEN_FILE")"""
    elif place.backend == "vertex":
        tokens = "\n  id_tokens:\n    IDENTITY_TOKEN: {aud: https://gitlab.com}"
        pool = "//iam.googleapis.com/projects/NUMBER/locations/global/workloadIdentityPools/ci/providers/gitlab"
        config = {
            "type": "external_account",
            "audience": pool,
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": {"file": "/tmp/identity-token"},  # noqa: S108 - in a container of its own
        }
        variables = f"""
    GOOGLE_APPLICATION_CREDENTIALS: /tmp/google.json
    GOOGLE_CLOUD_PROJECT: {place.project or "PROJECT"}
    GOOGLE_IDENTITY: '{json.dumps(config)}'"""
        before = """
    - (umask 077; printf %s "$IDENTITY_TOKEN" > /tmp/identity-token)
    - printf %s "$GOOGLE_IDENTITY" > "$GOOGLE_APPLICATION_CREDENTIALS\""""
    elif place.backend == "kubernetes":
        tokens = "\n  id_tokens:\n    IDENTITY_TOKEN: {aud: kubernetes}"
        variables = f"""
    CLUSTER_SERVER: {json.dumps(place.server or "https://SERVER")}
    CLUSTER_AUTHORITY: AUTHORITY   # the base64 text certificate-authority-data of your kubeconfig"""
        before = f"""
    - |
{_indent(kubeconfig_commands(place, "gitlab"), 6)}"""
    rules = "\n    - cloudtrain doctor local" if place.pinned_policy else ""
    compare = _indent(compare_commands(job, place, "$CI_MERGE_REQUEST_TARGET_BRANCH_NAME"), 6)
    return f"""\
# Written by `cloudtrain init --ci gitlab`: a plan for each merge request, a run for each commit on {branch}.
stages: [plan, train]
variables:
  CLOUDTRAIN: {_wheel(place)}   # what pip installs: the address of your wheel, or name==version of your index
plan:
  stage: plan
  image: python:3.12
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  interruptible: true
  variables:
    GIT_DEPTH: 0
    RUNNER_FOLDER: $CI_PROJECT_DIR/.cloudtrain-ci
  before_script:
    - pip install {place.packages}
    - mkdir -p "$RUNNER_FOLDER"
    - echo '*' > "$RUNNER_FOLDER/.gitignore"
  script:
    - |
{compare}
  artifacts:
    when: always
    paths: [.cloudtrain-ci/plan.json, .cloudtrain-ci/difference.txt]
train:
  stage: train
  image: python:3.12
  rules:
    - if: $CI_COMMIT_BRANCH == "{branch}" && $CI_PIPELINE_SOURCE == "push"
  timeout: 6h{tokens}
  variables:
    COMMIT: $CI_COMMIT_SHA{variables}
  before_script:
    - pip install {place.packages} plotly{before}{rules}
  script:
    - {submit_command(job)}
  after_script:
    - if [ "$CI_JOB_STATUS" = canceled ]; then cloudtrain cancel --key "$COMMIT"; fi
    - mkdir -p .cloudtrain-ci && echo '*' > .cloudtrain-ci/.gitignore   # no part of the source
    - cloudtrain report -o .cloudtrain-ci/report.html
  artifacts:
    when: always
    paths: [.cloudtrain-ci/report.html]
"""


def _wheel(place: Place) -> str:
    return json.dumps(place.wheel)


def _indent(lines: list[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines)
