import http.server
import threading

import boto3


class Store(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does."""

    def refuse(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET = do_PUT = do_POST = refuse

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
threading.Thread(target=server.serve_forever, daemon=True).start()
s3 = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{server.server_port}",
    region_name="us-east-1",
    aws_access_key_id="id",
    aws_secret_access_key="key",
)

print(s3.list_objects_v2(Bucket="my-trainig-data"))
