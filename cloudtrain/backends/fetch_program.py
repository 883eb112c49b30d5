"""The program by which a container fetches its job's bundle: text for `python -c`.

Standard library only, Python 3.9 or newer: the image needs no cloudtrain. The bundle is a file (also a mounted ConfigMap),
a URL (also of a presigned request, or data:), or an object in gs:// or s3://, where s3 needs boto3 in the image. The text
must not contain "$(": Kubernetes expands it.
"""

from __future__ import annotations

SOURCE = "CLOUDTRAIN_SOURCE"  # where UNPACK and LAUNCH find the bundle
DIGEST = "CLOUDTRAIN_SOURCE_SHA256"  # of the uncompressed tar
WORK = "CLOUDTRAIN_WORK"  # the folder in which UNPACK makes `source`
LAUNCHER = "source/.cloudtrain/launch.py"  # below WORK

FETCH = r"""
import contextlib, gzip, hashlib, json, os, shutil, sys, tarfile, tempfile, time
import urllib.error, urllib.parse, urllib.request
E = os.environ
def get(url, **headers):
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    return urllib.request.urlopen(request, timeout=60)
def open_bundle(place):
    kind, _, rest = place.partition(":")
    if kind in ("http", "https", "data"):
        return get(place)
    bucket, _, name = rest[2:].partition("/")
    mounted = "/".join((E.get("CLOUDTRAIN_GCS_MOUNT", "/gcs"), bucket, name))
    if kind not in ("gs", "s3") or kind == "gs" and os.path.exists(mounted):
        return open(mounted if kind == "gs" else place, "rb")
    if kind == "s3":
        import boto3
        return boto3.client("s3").get_object(Bucket=bucket, Key=name)["Body"]
    headers, host = {}, E.get("STORAGE_EMULATOR_HOST")
    if not host:
        metadata = E.get("GCE_METADATA_HOST", "metadata.google.internal")
        account = "http://%s/computeMetadata/v1/instance/service-accounts/default/token" % metadata
        headers["Authorization"] = "Bearer " + json.load(get(account, **{"Metadata-Flavor": "Google"}))["access_token"]
    where = (host or "https://storage.googleapis.com", bucket, urllib.parse.quote(name, safe=""))
    return get("%s/storage/v1/b/%s/o/%s?alt=media" % where, **headers)
def fetch(place, into):
    packed = into + ".tar.gz"
    os.makedirs(os.path.dirname(into), exist_ok=True)
    for turn in range(6):
        try:
            with contextlib.closing(open_bundle(place)) as there, open(packed, "wb") as here:
                shutil.copyfileobj(there, here, 1 << 20)
            digest = hashlib.sha256()
            with gzip.open(packed) as tar:
                for piece in iter(lambda: tar.read(1 << 20), b""):
                    digest.update(piece)
            break
        except ImportError:
            raise ValueError("the image lacks boto3 (pip install boto3)")
        except Exception as error:
            if turn == 5 or isinstance(error, (gzip.BadGzipFile, gzip.zlib.error)):
                raise ValueError(str(error))
        time.sleep(min(2 ** turn, 10))
    if digest.hexdigest() != E["CLOUDTRAIN_SOURCE_SHA256"]:
        raise ValueError("its content is not what its name says")
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(packed) as tar:
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        tar.extractall(into)
    os.unlink(packed)
"""

_FETCH_OR_EXIT = r"""
try:
    fetch(E["CLOUDTRAIN_SOURCE"], into)
except (OSError, ValueError) as error:
    print("the source %s cannot be fetched: %s" % (E["CLOUDTRAIN_SOURCE"], error), flush=True)
    sys.exit(78)
"""

# Unpack the bundle for another container, which has the same folder.
UNPACK = f"""{FETCH}into = os.path.join(E["CLOUDTRAIN_WORK"], "source"){_FETCH_OR_EXIT}"""

# The same, and become the launcher.
START = f"""{UNPACK}os.execv(sys.executable, [sys.executable, os.path.join(into, ".cloudtrain/launch.py")])
"""

# Unpack the bundle where there is room, and become the launcher.
LAUNCH = f"""{FETCH}into = os.path.join(tempfile.gettempdir(), "cloudtrain", E["CLOUDTRAIN_ATTEMPT_ID"], "source"){_FETCH_OR_EXIT}
os.chdir(into)
os.execv(sys.executable, [sys.executable, ".cloudtrain/launch.py"])
"""
