"""Runs the control plane as a process: logging, listening, and an end that leaves no request hanging."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from types import FrameType

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from structlog.typing import EventDict, Processor
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal_service.app import create_app
from shoal_service.migrating import migrate
from shoal_service.services import Services
from shoal_service.settings import Settings

# Libraries whose lines at `debug` have the values of statements, or what is sent.
_TALKATIVE = ("aiosqlite", "httpcore", "sse_starlette", "urllib3")
_GRACE_S = 5  # what is left of open requests when this is over is cut off


class Server(uvicorn.Server):
    """Wakes streams and long polls when the end is asked for, and says once where it listens."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _services(self.config).bell.close()
        # Unlike uvicorn's own, this does not raise the signal again afterwards: an end that was asked for is a success.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _services(config: uvicorn.Config) -> Services:
    assert isinstance(config.app, FastAPI)
    services = config.app.state.services
    assert isinstance(services, Services)
    return services


class Patient(H11Protocol):
    """One connection, which is closed where the head of a request has not come within `body_timeout_s`: of the first
    one, too, for which nobody else waits less."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def handle_events(self) -> None:
        super().handle_events()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _look(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._head_due is None:
            timeout_s = _services(self.config).settings.body_timeout_s
            self._head_due = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


def make_server(settings: Settings) -> Server:
    """A server that `run()` serves with until SIGINT or SIGTERM. Raises ValueError or OSError for a bad data folder."""
    configure_logging(settings.log_level)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        http=Patient,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # Whoever is believed says from which address and how a request came: that is in the record, and counts guesses.
        proxy_headers=settings.behind_proxy,
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
    )
    return Server(config)


def configure_logging(level: str) -> None:
    """One JSON object per line on standard error, or words where that is a terminal: our own lines and libraries';
    standard output stays free."""
    is_terminal = sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _without_colours],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_rendering(is_terminal),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))


def _without_colours(_logger: object, _method: str, line: EventDict) -> EventDict:
    """uvicorn sends each of its lines a second time, with the signs that make a terminal colour it."""
    line.pop("color_message", None)
    return line


def _rendering(is_terminal: bool) -> tuple[Processor, ...]:
    if is_terminal:
        # Without the values of variables, which may be secrets.
        return (structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),)
    return (structlog.processors.format_exc_info, structlog.processors.JSONRenderer())


def run(settings: Settings) -> None:
    """Serves until it is asked to stop."""
    make_server(settings).run()


def run_migrations(settings: Settings) -> None:
    """Returns when the database has the tables of this version. Raises what `migrate` does."""
    configure_logging(settings.log_level)
    if settings.database_url is None:
        settings.data_path.mkdir(parents=True, exist_ok=True, mode=0o700)
    asyncio.run(migrate(settings.resolved_database_url, settings.database_timeout_s))
