"""A Ray cluster as deploy/ starts it, each node in a network of its own: start-head.sh and start-worker.sh run in
network namespaces, with homes, folders and addresses of their own, under token authentication, and the head offers the
cluster over TLS to a control plane that stands on the bridge. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from networks import Network
from servers import free_ports
from waiting import eventually

from shoal.client import Client

ROOT = Path(__file__).parents[1]
CLUSTER_ID = "apart"
HEAD = "head"
_PROGRAMS = Path(sys.executable).parent
_START_S = 180.0
_TOKEN = "0123456789abcdef" * 4


class StartedNodes:
    """`folder` takes logs, homes and data; `workers` are names with their device types. A context."""

    def __init__(self, folder: Path, workers: Mapping[str, str]) -> None:
        self._folder = folder
        self._workers = dict(workers)
        self._started: defaultdict[str, list[subprocess.Popen[bytes]]] = defaultdict(list)
        self._closing = contextlib.ExitStack()
        self.network = Network((HEAD, *workers))

    def __enter__(self) -> StartedNodes:
        try:
            # Paths of sockets are short.
            self._ray = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="sn-")))
            self._memory = Path(tempfile.mkdtemp(prefix="shoal-", dir="/dev/shm"))
            self._closing.callback(shutil.rmtree, self._memory, ignore_errors=True)
            self._closing.enter_context(self.network)
            self._closing.callback(self._end_all)
            self._certificate, self._key = certificate(self._folder, self.network.address)
            data = self._folder / "control-plane"
            plane = control_plane(data, self.network.address, self._certificate, self._key)
            self._url, self.client = self._closing.enter_context(plane)
            made = self.client.people.create_token("connector", role="connector", cluster_id=CLUSTER_ID)
            (self._folder / "connector.token").write_text(made["secret"])
            self.start_head()
            for name in self._workers:
                self.start_worker(name)
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def start_head(self) -> None:
        """As on a machine of its own: without a dashboard, which takes a gigabyte."""
        told = {"SHOAL_SERVER": self._url, "SHOAL_TOKEN_FILE": str(self._folder / "connector.token")}
        told |= {"SHOAL_CLUSTER_ID": CLUSTER_ID, "RAY_TMPDIR": str(self._ray / HEAD)}
        self._start(HEAD, "start-head.sh", told, "--include-dashboard=false")

    def start_worker(self, name: str) -> None:
        labels = "host-memory-bytes=2147483648,inter-bytes-per-s=1e10,intra-bytes-per-s=1e10"
        told = {"SHOAL_HEAD_ADDRESS": f"{self.network.host(HEAD)}:6379", "SHOAL_NODE_NAME": name}
        told |= {"SHOAL_NODE_DEVICE": self._workers[name], "SHOAL_NODE_POOL": "workers", "SHOAL_NODE_LABELS": labels}
        self._start(name, "start-worker.sh", told, f"--temp-dir={self._ray / name}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def processes(self, name: str) -> list[psutil.Process]:
        """All that a node has started and that lives: what starts it begins a session, which Ray never leaves."""
        found, sessions = [], {each.pid for each in self._started[name]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, name: str) -> None:
        """As a machine that loses its power: everything at once, with what it kept in memory."""
        victims = self.processes(name)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.suspend()  # or what it starts from here on would escape the list
        for victim in {*victims, *self.processes(name)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=10)
        shutil.rmtree(self._memory / name, ignore_errors=True)

    def stop(self, name: str) -> None:
        """As a service manager does: a SIGTERM to what it has started. Returns at once."""
        self._started[name][-1].terminate()

    def _start(self, name: str, script: str, told: Mapping[str, str], *options: str) -> None:
        home = self._folder / f"{name}-home"
        (home / ".ray").mkdir(parents=True, exist_ok=True)
        (home / ".ray/auth_token").write_text(_TOKEN)
        memory, disk = self._memory / name, self._folder / f"{name}-disk"
        environment = {
            "PATH": f"{_PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "SSL_CERT_FILE": str(self._certificate),
            "OMP_NUM_THREADS": "1",
            "SHOAL_NODE_ADDRESS": self.network.host(name),
            "SHOAL_NODE_OBJECT_STORE_BYTES": "80000000",
            "SHOAL_NODE_ZONE": "here",
            "SHOAL_NODE_SPOT": "false",
            "SHOAL_WORKER_MEMORY_DIR": str(memory),
            "SHOAL_WORKER_DISK_DIR": str(disk),
            "SHOAL_WORKER_METADATA_URL": "http://127.0.0.1:9",
            "SHOAL_WORKER_LINK_LIMIT_S": "0",  # links as labels say, or a tiny model would be trained by one node alone
            "SHOAL_WORKER_SILENCE_S": "5",  # many processes share few cores: what is only slow must not pass for dead
            "SHOAL_WORKER_SILENCE_CONFIRMED_S": "3",
            **told,
        }
        command = ["ip", "netns", "exec", self.network.namespace(name), ROOT / "deploy" / script, "--block"]
        command += ["--num-cpus=1", *options]
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            started = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._started[name].append(started)

        def runs() -> bool:
            assert started.poll() is None, self.log(name)
            return "Ray runtime started" in self.log(name)

        eventually(runs, _START_S)

    def _end_all(self) -> None:
        for name, started in list(self._started.items()):
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for each in started:
                each.wait(30)


@contextlib.contextmanager
def control_plane(data: Path, address: str, certificate: Path, key: Path) -> Iterator[tuple[str, Client]]:
    """At this address, over TLS, and a client of its administrator."""
    (port,) = free_ports(1)
    url = f"https://{address}:{port}"
    options = ["--host", address, "--port", str(port), "--data-dir", data, "--file-roots", "/"]
    options += ["--tls-cert", certificate, "--tls-key", key]
    told = data.with_name(f"{data.name}.log")
    with told.open("wb") as log:
        process = subprocess.Popen([_PROGRAMS / "shoal", "serve", *options], stdout=log, stderr=log)
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(certificate)  # of the client's, too

    def answers() -> bool:
        assert process.poll() is None, told.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/healthz").is_success
        return False

    try:
        eventually(answers, _START_S)
        with Client(url, token=(data / "admin.token").read_text().strip()) as client:
            yield url, client
    finally:
        os.environ.pop("SSL_CERT_FILE")
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before
        process.terminate()
        process.wait(30)


def certificate(folder: Path, address: str) -> tuple[Path, Path]:
    """Of a server at this address, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    at = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    signed = made.add_extension(at, critical=False).sign(key, hashes.SHA256())
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return paths
