"""The command of every container: fetch the source, run the launcher, report its end, then idle until the lease is closed.

A container that exits is started again, and the lease is billed all the same. So the command idles after the end, and a
container that finds the mark of an earlier start reports that it was restarted instead of training again.
"""

from __future__ import annotations

from cloudtrain.backends.fetch_program import FETCH

URLS = "CLOUDTRAIN_AKASH_URLS"  # JSON: presigned URLs of `source`, `given`, `began` (GET and PUT) and `end`
INLINE = "CLOUDTRAIN_AKASH_SOURCE_"  # and a number: the source in base64, of an SDL that is sent by hand
GIVEN = "CLOUDTRAIN_AKASH_SECRETS"  # of such an SDL: names of variables that hold secrets, by commas

COMMAND = (
    FETCH
    + r"""import signal, socket, subprocess, threading
urls = json.loads(E.pop("CLOUDTRAIN_AKASH_URLS", "") or "{}")
names = [name for name in E.pop("CLOUDTRAIN_AKASH_SECRETS", "").split(",") if name]
by_hand = {"env:" + name: E.pop(name) for name in names if name in E}
into = os.path.join(tempfile.gettempdir(), "cloudtrain", E["CLOUDTRAIN_ATTEMPT_ID"], "source")
stopped, child, tail = [], [], bytearray()
def stop(number, frame):
    stopped.append(number)
    for process in child:
        process.send_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
def ask(name, data=None, tries=6):
    if name not in urls:
        return b"" if data is None else None
    for turn in range(tries):
        try:
            kind = {} if data is None else {"Content-Type": "application/octet-stream"}
            request = urllib.request.Request(urls[name], data, kind, method="GET" if data is None else "PUT")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and name == "seen":
                return None
            why = "HTTP %d" % error.code
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", error))
        time.sleep(min(2 ** turn, 10) if turn < tries - 1 else 0)
    raise OSError("%s cannot be %s: %s" % (name, "read" if data is None else "written", why))
def report(code, reason, kind="exit"):
    text = {"kind": kind, "code": code, "reason": reason, "tail": bytes(tail[-16384:]).decode("utf-8", "replace")}
    try:
        ask("end", json.dumps(text).encode(), 8)
    except OSError as error:
        print("the end of this node cannot be reported: %s" % error, flush=True)
def idle():
    print("this container idles until its lease is closed", flush=True)
    while not stopped:
        time.sleep(0.2)
    sys.exit(0)
def refuse(why):
    print(why, flush=True)
    report(78, why, "refused")
    idle()
pieces = []
while "CLOUDTRAIN_AKASH_SOURCE_%d" % len(pieces) in E:
    pieces.append(E.pop("CLOUDTRAIN_AKASH_SOURCE_%d" % len(pieces)))
try:
    seen = ask("seen") if "seen" in urls else None
    if seen:
        print("this container was started before: the attempt cannot continue in it", flush=True)
        report(None, "the container was killed or restarted by its provider (out of memory, a lost machine)", "restarted")
        idle()
    if stopped:
        sys.exit(0)
    ask("began", b"1")
    given = json.loads(ask("given") or b"{}") or {"secrets": by_hand}
except (OSError, ValueError) as error:
    refuse("the job cannot be fetched: %s" % error)
try:
    fetch("data:;base64," + "".join(pieces) if pieces else urls.get("source", ""), into)
except (OSError, ValueError) as error:
    refuse("the source cannot be fetched: %s" % error)
if int(E["CLOUDTRAIN_NUM_NODES"]) > 1:
    own = E.get("CLOUDTRAIN_POD_IP") or socket.gethostbyname(socket.gethostname())
    first = own if E["CLOUDTRAIN_NODE_RANK"] == "0" else E.get("NODE_0_SERVICE_HOST") or "node-0"
    E["CLOUDTRAIN_HOST"], E["CLOUDTRAIN_CONTROL"] = own, first + ":29380"
E["CLOUDTRAIN_STDIN"] = "1"
launcher = subprocess.Popen(
    [sys.executable, ".cloudtrain/launch.py"], cwd=into, env=E, stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
child.append(launcher)
if stopped:
    launcher.send_signal(signal.SIGTERM)
def copy():
    while True:
        data = os.read(launcher.stdout.fileno(), 65536)
        if not data:
            return
        os.write(1, data)
        tail.extend(data)
        del tail[:-16384]
reader = threading.Thread(target=copy, daemon=True)
reader.start()
try:
    launcher.stdin.write(json.dumps(given).encode())
    launcher.stdin.close()
except OSError:
    pass
del given
while launcher.poll() is None:
    time.sleep(0.05)
reader.join(10)
code = launcher.returncode
report(code if code >= 0 else 128 - code, "")
idle()
"""
)
