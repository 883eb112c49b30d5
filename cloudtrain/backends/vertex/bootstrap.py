"""The start command of a Vertex AI container: fetch the source from Cloud Storage, then exec the launcher.

The image needs no cloudtrain: standard library only, Python 3.9 or newer. The command reads the bundle through the mount
/gcs, or through the JSON API without that mount.
"""

from __future__ import annotations

SOURCE = "CLOUDTRAIN_SOURCE"  # gs://bucket/path of the bundle
DIGEST = "CLOUDTRAIN_SOURCE_SHA256"  # digest of the tar inside the bundle

FROM_CLOUD_STORAGE = r"""
import gzip, hashlib, json, os, shutil, sys, tarfile, tempfile, time, urllib.parse, urllib.request
E = os.environ
bucket, _, name = E["CLOUDTRAIN_SOURCE"][5:].partition("/")
mounted = "/".join((E.get("CLOUDTRAIN_GCS_MOUNT", "/gcs"), bucket, name))
host = E.get("STORAGE_EMULATOR_HOST")
metadata = E.get("GCE_METADATA_HOST", "metadata.google.internal")
account = "http://%s/computeMetadata/v1/instance/service-accounts/default/token" % metadata
into = os.path.join(tempfile.gettempdir(), "cloudtrain", E["CLOUDTRAIN_ATTEMPT_ID"])
def ask(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
def source():
    if os.path.exists(mounted):
        return open(mounted, "rb")
    headers = {}
    if not host:
        headers["Authorization"] = "Bearer " + json.load(ask(account, **{"Metadata-Flavor": "Google"}))["access_token"]
    where = (host or "https://storage.googleapis.com", bucket, urllib.parse.quote(name, safe=""))
    return ask("%s/storage/v1/b/%s/o/%s?alt=media" % where, **headers)
os.makedirs(into, exist_ok=True)
packed, why, whole = os.path.join(into, "source.tar.gz"), "", False
for turn in range(6):
    try:
        with source() as there, open(packed, "wb") as here:
            shutil.copyfileobj(there, here, 1 << 20)
        digest = hashlib.sha256()
        with gzip.open(packed) as tar:
            for piece in iter(lambda: tar.read(1 << 20), b""):
                digest.update(piece)
        whole = digest.hexdigest() == E["CLOUDTRAIN_SOURCE_SHA256"]
        why = "its content is not what its name says"
        break
    except (gzip.BadGzipFile, gzip.zlib.error) as error:
        why = str(error)
        break
    except (OSError, EOFError, ValueError) as error:
        why = str(error)
    time.sleep(min(2 ** turn, 10) if turn < 5 else 0)
if not whole:
    print("the source %s cannot be fetched: %s" % (E["CLOUDTRAIN_SOURCE"], why), flush=True)
    sys.exit(78)
shutil.rmtree(os.path.join(into, "source"), ignore_errors=True)
with tarfile.open(packed) as tar:
    tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    tar.extractall(os.path.join(into, "source"))
os.unlink(packed)
os.chdir(os.path.join(into, "source"))
os.execv(sys.executable, [sys.executable, ".cloudtrain/launch.py"])
"""
