"""The command of the init container: download and unpack the source bundle for the launcher's container.

Standard library only, Python 3.9 or newer; the image needs no cloudtrain. The source is a file mounted from a ConfigMap,
or an object in gs:// or s3:// (s3 needs boto3 in the image). The command must not contain "$(": Kubernetes expands it.
"""

from __future__ import annotations

SOURCE = "CLOUDTRAIN_SOURCE"  # path, gs://bucket/name or s3://bucket/name
DIGEST = "CLOUDTRAIN_SOURCE_SHA256"  # of the uncompressed tar
WORK = "CLOUDTRAIN_WORK"  # an empty folder, shared by the containers of the pod
LAUNCHER = "source/.cloudtrain/launch.py"  # below WORK; the launcher's container runs it as PID 1

COMMAND = r"""
import gzip, hashlib, json, os, shutil, sys, tarfile, time, urllib.parse, urllib.request
E = os.environ
place, work = E["CLOUDTRAIN_SOURCE"], E["CLOUDTRAIN_WORK"]
packed, into = os.path.join(work, "source.tar.gz"), os.path.join(work, "source")
def ask(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
def there():
    kind, _, rest = place.partition("://")
    if kind == place:
        return open(place, "rb")
    bucket, _, name = rest.partition("/")
    if kind == "s3":
        import boto3
        return boto3.client("s3").get_object(Bucket=bucket, Key=name)["Body"]
    headers, host = {}, E.get("STORAGE_EMULATOR_HOST")
    if not host:
        metadata = E.get("GCE_METADATA_HOST", "metadata.google.internal")
        account = "http://%s/computeMetadata/v1/instance/service-accounts/default/token" % metadata
        headers["Authorization"] = "Bearer " + json.load(ask(account, **{"Metadata-Flavor": "Google"}))["access_token"]
    where = (host or "https://storage.googleapis.com", bucket, urllib.parse.quote(name, safe=""))
    return ask("%s/storage/v1/b/%s/o/%s?alt=media" % where, **headers)
def refuse(why):
    print("the source %s cannot be used: %s" % (place, why), flush=True)
    sys.exit(78)
os.makedirs(work, exist_ok=True)
for turn in range(6):
    try:
        with open(packed, "wb") as here:
            source = there()
            for piece in iter(lambda: source.read(1 << 20), b""):
                here.write(piece)
        break
    except ImportError:
        refuse("the image lacks boto3 (pip install boto3)")
    except Exception as error:
        if turn == 5:
            refuse(error)
        time.sleep(min(2 ** turn, 10))
digest = hashlib.sha256()
try:
    with gzip.open(packed) as tar:
        for piece in iter(lambda: tar.read(1 << 20), b""):
            digest.update(piece)
except (OSError, EOFError, gzip.zlib.error) as error:
    refuse(error)
if digest.hexdigest() != E["CLOUDTRAIN_SOURCE_SHA256"]:
    refuse("its content is not what its name says")
shutil.rmtree(into, ignore_errors=True)
with tarfile.open(packed) as tar:
    tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    tar.extractall(into)
os.unlink(packed)
"""
