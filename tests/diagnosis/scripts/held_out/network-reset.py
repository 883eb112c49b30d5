import socket
import struct
import threading
import urllib.request

server = socket.create_server(("127.0.0.1", 0))


def reset():
    for _ in range(5):
        peer, _ = server.accept()
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()


threading.Thread(target=reset, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/shard-0.tar")
