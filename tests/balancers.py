"""The load balancers whose configurations are shipped in examples/replicas; for tests and for bench.replicas."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "examples/replicas"
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
#: In each, the line that keeps conversations where they are; without it requests go to the replicas in turn.
STICKY = {"nginx": r"^\s*hash .*\n", "haproxy": r"^\s*(balance hdr.*|hash-type .*)\n"}


def configured(balancer: str, ports: dict[int, int], sticky: bool = True) -> str:
    """The configuration that is shipped, with other ports."""
    text = (FOLDER / FILES[balancer]).read_text("utf8")
    for known, port in ports.items():
        text = text.replace(str(known), str(port))
    return text if sticky else re.sub(STICKY[balancer], "", text, flags=re.MULTILINE)


@contextlib.contextmanager
def running(balancer: str, program: str, text: str, port: int) -> Iterator[None]:
    """nginx or HAProxy with this configuration, in the foreground, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILES[balancer])
        if balancer == "nginx":  # whose folders only root can write to
            kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            text = text.replace("http {", "http {" + "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds))
        path.write_text(text, "utf8")
        command = [program, "-f", str(path), "-db"]
        if balancer == "nginx":
            command = [program, "-p", folder, "-c", str(path), "-e", str(Path(folder, "log")),
                       "-g", f"daemon off; pid {folder}/pid;"]  # fmt: skip
        with (Path(folder, "said")).open("w+") as said:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            try:
                deadline = time.monotonic() + 30
                while not _answers(port):
                    if process.poll() is not None or time.monotonic() > deadline:
                        said.seek(0)
                        raise RuntimeError(f"{program} did not start: {said.read()}")
                    time.sleep(0.02)
                yield
            finally:
                process.terminate()
                process.wait(20)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
