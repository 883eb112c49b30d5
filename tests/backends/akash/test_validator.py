"""Akash's own library, npm @akashnetwork/chain-sdk, reads our SDLs: valid, and the same manifest and hash as ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends.akash import groups
from cloudtrain.backends.akash.backend import AkashBackend
from cloudtrain.source.bundle import Bundle
from tests.backends.akash.schema import check_sdl
from tests.backends.akash.test_request import CASES, OPTIONS, bundle, planned
from tests.conftest import require
from tests.simulators.akash.server import API_KEY, Simulator

# Only prereleases exist (2026-11). This one is older than `reclamation`, which is no part of a manifest or its hash.
PACKAGE = "@akashnetwork/chain-sdk@1.0.0-alpha.25"
SCRIPT = """
const sdk = require('@akashnetwork/chain-sdk'), yaml = require('js-yaml'), fs = require('fs');
(async () => {
  const answers = [];
  for (const path of process.argv.slice(2)) {
    const made = sdk.generateManifest(yaml.load(fs.readFileSync(path, 'utf8')));
    answers.push(made.ok ? {
      manifest: sdk.manifestToSortedJSON(made.value.groups),
      hash: Buffer.from(await sdk.generateManifestVersion(made.value.groups)).toString('base64'),
    } : {errors: made.value});
  }
  console.log(JSON.stringify(answers));
})();
"""
__all__ = ["bundle"]


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, installed by npm; CLOUDTRAIN_AKASH_SDK names one that is there."""
    if folder := os.environ.get("CLOUDTRAIN_AKASH_SDK"):
        return Path(folder)
    require("npm")
    made = tmp_path_factory.mktemp("npm")
    (made / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", PACKAGE], cwd=made, check=True, timeout=600)
    return made


def ask(sdk: Path, paths: list[Path], tmp_path: Path) -> list[dict]:
    require("node")
    script = tmp_path / "ask.cjs"
    script.write_text(SCRIPT)
    env = {**os.environ, "NODE_PATH": str(sdk / "node_modules")}
    done = subprocess.run(["node", script, *paths], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_akashs_library_takes_our_sdls_and_makes_the_same_hash(sdk: Path, bundle: Bundle, tmp_path: Path) -> None:
    sdls = [planned(bundle, *case).request["sdl"] for case in CASES.values()]
    by_hand = AkashBackend(OPTIONS, Path("runs")).manifests(planned(bundle, {}, {}), bundle.path.read_bytes())
    sdls.append(yaml.safe_load(by_hand))
    sdls.append(yaml.safe_load((Path(__file__).parent / "letters.yaml").read_text()))
    paths = []
    for number, sdl in enumerate(sdls):
        paths.append(tmp_path / f"{number}.yaml")
        known = {name: value for name, value in sdl.items() if name != "reclamation"}
        paths[-1].write_text(json.dumps(known))  # as `submit` sends it
    for sdl, answer in zip(sdls, ask(sdk, paths, tmp_path), strict=True):
        ours = groups.manifest_json(sdl)
        assert answer == {"manifest": ours, "hash": groups.manifest_hash(ours)}


@pytest.mark.long
def test_akashs_library_refuses_what_the_schema_lets_through(sdk: Path, bundle: Bundle, tmp_path: Path) -> None:
    """The check above can fail: a persistent volume that one service does not mount."""
    sdl = json.loads(json.dumps(planned(bundle, *CASES["everything"]).request["sdl"]))
    del sdl["reclamation"]
    del sdl["services"]["node-1"]["params"]
    (tmp_path / "wrong.yaml").write_text(json.dumps(sdl))
    (answer,) = ask(sdk, [tmp_path / "wrong.yaml"], tmp_path)
    assert "data" in json.dumps(answer["errors"]), answer


# As its README does it: the provider's gateway by `fetch`, with a token. The library has no client for the Console.
CLIENT = """
const sdk = require('@akashnetwork/chain-sdk'), yaml = require('js-yaml'), fs = require('fs');
const [url, key, path] = process.argv.slice(2);
async function ask(method, path, body, headers = {'x-api-key': key}) {
  const text = body === undefined || typeof body === 'string' ? body : JSON.stringify(body);
  const answer = await fetch(url + path, {method, body: text, headers: {'Content-Type': 'application/json', ...headers}});
  const said = await answer.text();
  if (!answer.ok) throw new Error(method + ' ' + path + ': ' + answer.status + ' ' + said);
  return said ? JSON.parse(said) : null;
}
(async () => {
  const text = fs.readFileSync(path, 'utf8'), made = sdk.generateManifest(yaml.load(text));
  if (!made.ok) throw new Error(JSON.stringify(made.value));
  const manifest = sdk.manifestToSortedJSON(made.value.groups);
  const hash = Buffer.from(await sdk.generateManifestVersion(made.value.groups)).toString('base64');
  const {dseq, manifest: theirs} = (await ask('POST', '/v1/deployments', {data: {sdl: text}})).data;
  const listed = (await ask('GET', '/v1/deployments?skip=0&limit=10')).data.deployments;
  const bid = (await ask('GET', '/v1/bids?dseq=' + dseq)).data[0].bid;
  const lease = {dseq, gseq: bid.id.gseq, oseq: bid.id.oseq, provider: bid.id.provider};
  await ask('POST', '/v1/leases', {manifest, leases: [lease]});
  const {token} = (await ask('POST', '/v1/create-jwt-token', {data: {ttl: 600, leases: {access: 'full'}}})).data;
  const manager = new sdk.JwtTokenManager({}), bearer = {Authorization: 'Bearer ' + token};
  await ask('PUT', '/deployment/' + dseq + '/manifest', manifest, bearer);
  let status;
  do {
    status = await ask('GET', '/lease/' + dseq + '/' + lease.gseq + '/' + lease.oseq + '/status', undefined, bearer);
  } while (!status.services.web.available);
  await ask('DELETE', '/v1/deployments/' + dseq);
  console.log(JSON.stringify({
    manifest: theirs === manifest, hash: listed[0].deployment.hash === hash,
    token: manager.validatePayload(manager.decodeToken(token)), web: status.services.web,
  }));
})();
"""
SDL = """
version: "2.0"
services:
  web:
    image: python:3.12
    command: [python3, -m, http.server, "--bind", 127.0.0.1, "0"]
    expose: [{port: 8000, as: 80, to: [{global: true}]}]
profiles:
  compute: {web: {resources: {cpu: {units: 0.5}, memory: {size: 512Mi}, storage: [{size: 1Gi}]}}}
  placement: {anywhere: {pricing: {web: {denom: uact, amount: 10000}}}}
deployment: {web: {anywhere: {profile: web, count: 1}}}
"""


@pytest.mark.long
def test_a_client_on_akashs_library_uses_the_simulator(sdk: Path, tmp_path: Path) -> None:
    """It sends the manifest that the library makes, and the library reads the token of the gateway."""
    (tmp_path / "deploy.yaml").write_text(SDL)
    (tmp_path / "client.cjs").write_text(CLIENT)
    env = {**os.environ, "NODE_PATH": str(sdk / "node_modules")}
    with Simulator(tmp_path / "akash", check_sdl=check_sdl) as simulator:
        command = ["node", tmp_path / "client.cjs", simulator.url, API_KEY, tmp_path / "deploy.yaml"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["manifest"] and seen["hash"], "the simulator makes another manifest than the library"
    assert seen["token"]["isValid"], seen["token"]
    assert (seen["web"]["available"], seen["web"]["total"]) == (1, 1)
