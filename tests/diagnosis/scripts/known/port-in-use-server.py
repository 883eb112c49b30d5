import http.server
import socket

taken = socket.create_server(("127.0.0.1", 0))
print("starting the metrics server")
http.server.HTTPServer(taken.getsockname(), http.server.SimpleHTTPRequestHandler)
