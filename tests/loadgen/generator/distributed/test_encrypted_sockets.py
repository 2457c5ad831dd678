"""The sockets of master and workers, in a child process: locust's modules make sockets cooperative."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SETUP = """
import gevent
from loadgen.generator.distributed.encrypted_sockets import EncryptedClient, EncryptedServer, message_of
from loadgen.generator.worker_messages import FROM_WORKER
from locust.rpc.protocol import Message

server = EncryptedServer("127.0.0.1", 0, "ours")

def client(name, key="ours"):
    return EncryptedClient("127.0.0.1", server.port, name, key)

def hello(name, kind=FROM_WORKER, **data):
    return Message(kind, {"type": "hello", **data}, name)
"""
WRONG_KEY = """
stranger, worker = client("stranger", "guessed"), client("worker")
stranger.send(hello("stranger"))
with gevent.Timeout(30):
    while not stranger.is_refused():
        gevent.sleep(0.05)
worker.send(hello("worker"))
print(server.recv_from_client()[0], worker.is_refused())
"""
GARBAGE = """
worker = client("worker")
for frames in ([b""], [b"\\xff\\xfe"], [b"a", b"b", b"c"], [b"\\x93\\xa3abc\\xc0\\xa1x"], [b"\\x81" * 1000]):
    worker.socket.send_multipart(frames)
worker.send(hello("another"))                 # in the name of another worker
worker.send(hello("worker", "locustfile"))    # locust's request for a file
worker.send(hello("worker", ["x"]))
worker.send(Message(FROM_WORKER, None, "worker"))
worker.send(Message(FROM_WORKER, {"type": 5}, "worker"))
worker.send(Message(FROM_WORKER, {"__ObjectId__": 1, "as_str": "x"}, "worker"))
worker.send(hello("worker", good=True))
print(server.recv_from_client()[1].data)
"""
CAPTURED = """
import socket
listener, captured = socket.create_server(("127.0.0.1", 0)), []

def copy(source, sink):
    while data := source.recv(4096):
        captured.append(data)
        sink.sendall(data)

def relay():
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", server.port))
    gevent.joinall([gevent.spawn(copy, near, far), gevent.spawn(copy, far, near)])

gevent.spawn(relay)
worker = EncryptedClient("127.0.0.1", listener.getsockname()[1], "worker", "ours")
worker.send(hello("worker", secret="the-api-key"))
print(server.recv_from_client()[1].data["secret"], b"the-api-key" in b"".join(captured))
"""


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        pytest.param(WRONG_KEY, "worker False", id="wrong-key"),
        pytest.param(GARBAGE, "{'type': 'hello', 'good': True}", id="garbage", marks=pytest.mark.slow),
        pytest.param(CAPTURED, "the-api-key False", id="encrypted", marks=pytest.mark.slow),
    ],
)
def test_hardening_S3_only_messages_of_workers_with_the_key_arrive(script: str, printed: str):
    done = subprocess.run([sys.executable, "-c", SETUP + script], capture_output=True, text=True, timeout=120, cwd=ROOT)

    assert done.stdout.strip() == printed, done.stderr
