"""What an operator can set. The only reader of the environment in this package; each field is SHOAL_ and its name."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal_planner.secrecy import looks_secret
from shoal_service.buckets import EVERYWHERE, Buckets, read_buckets
from shoal_service.loopback import is_loopback
from shoal_service.mail import MailServer, mail_server
from shoal_service.places import Places
from shoal_service.tracking_hosts import Reach, TrackingHosts, named_origins, origin_of


class Settings(BaseSettings):
    """Durations are in seconds. Adding a field changes the golden list in tests/service/test_service_database.py."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True, extra="ignore")

    data_dir: Path = Field(
        default=Path("~/.shoal"), description="Folder of the administrator's token and of the default database."
    )
    tokens_dir: Path | None = Field(
        default=None,
        description="Folder of tokens that are made elsewhere, one a file: 'metrics', and 'connector-' and the id of a "
        "cluster. Default: none.",
    )
    database_url: str | None = Field(
        default=None,
        description="postgresql://USER:PASSWORD@HOST/NAME, or sqlite:///FILE. Default: SQLite in data_dir.",
    )
    database_timeout_s: float = Field(
        default=10.0, gt=0, description="How long the database may take to answer before a request is refused with 503."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    public_url: str | None = Field(
        default=None, description="Address at which browsers reach this server; default: the one they asked for."
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    max_lease_s: float = Field(default=300.0, gt=0, description="Longest lease that a cluster's connector may take.")
    cluster_lost_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a cluster may be late with its lease before jobs that can leave it go to others.",
    )
    standing_cluster_lost_s: float = Field(
        default=600.0,
        ge=0,
        description="The same where the cluster's head may die and come back while jobs step on.",
    )
    max_wait_s: float = Field(default=60.0, gt=0, description="Longest time that a long poll is held open.")
    poll_s: float = Field(
        default=1.0, gt=0, description="How often waiting requests look for what other replicas of this server wrote."
    )
    plan_time_limit_s: float = Field(default=10.0, gt=0, description="Longest search for a plan, at submission too.")
    store_check_s: float = Field(
        default=20.0, gt=0, description="Longest time that a checkpoint place may take to prove that it is writable."
    )
    tracker_lease_s: float = Field(
        default=30.0,
        gt=0,
        description="How long a replica of this server may be silent before another one writes to its jobs' trackers.",
    )
    tracker_timeout_s: float = Field(
        default=120.0, gt=0, description="Longest time that a tracker may take to take what a job has done."
    )
    tracking_hosts: str = Field(
        default="",
        description="Tracking servers, by commas, that get this server's credentials for MLflow, wherever they are: "
        "https://mlflow.example. The one of MLFLOW_TRACKING_URI is one of them.",
    )
    tracking_private: bool = Field(
        default=False,
        description="Whether jobs may name other tracking servers on this machine and in private networks, and without "
        "TLS. They get no credentials.",
    )
    events_kept_s: float | None = Field(
        default=None, gt=0, description="How long after a job has ended its journal is kept. Default: for ever."
    )
    points_kept_s: float | None = Field(
        default=None,
        gt=0,
        description="How long after a job has ended every point of its curve is kept, and not its outline alone. "
        "Default: for ever.",
    )
    log_kept_s: float = Field(default=30 * 86400.0, gt=0, description="How long lines that jobs printed are kept.")
    log_bytes_per_job: int = Field(
        default=10 * 2**30, gt=0, description="How much text that a job printed is kept, the newest of it."
    )
    metrics_jobs: int = Field(
        default=200, ge=0, description="How many jobs, the newest that run, have figures of their own at /metrics."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="The URL to which traces of recoveries are posted (OTLP over HTTP). Default: that of "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; without these, none are.",
    )
    no_progress_s: float = Field(
        default=600.0, gt=0, description="After how long without progress a job is stuck, and webhooks are told."
    )
    webhook_private: bool = Field(
        default=False,
        description="Whether webhooks may go to this machine and to private networks, and without TLS.",
    )
    smtp_url: SecretStr | None = Field(
        default=None,
        description="Mail server for webhooks of the form email: smtp://USER:PASSWORD@HOST:PORT or smtps://... "
        "Default: no letters are sent.",
    )
    mail_from: str | None = Field(default=None, description="The address that letters come from.")
    mail_domains: str = Field(
        default="", description="Comma-separated: domains that letters may go to. Default: that of mail_from."
    )
    pool_wait_s: float = Field(
        default=120.0, gt=0, description="How long a pool may give nothing of what is asked of it before it is short."
    )
    pool_start_s: float = Field(
        default=900.0, gt=0, description="How long a node that a cloud has given may take to join its cluster."
    )
    pool_back_off_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a short pool is not asked again; twice as long each further time, up to an hour.",
    )
    pool_idle_s: float = Field(
        default=600.0, gt=0, description="After how long in which no plan uses a rented node it is given back."
    )
    cloud_prices: Literal["none", "aws"] = Field(
        default="none", description="Whose spot prices are asked for, for pools with an instance_type: aws, or none."
    )
    session_s: float = Field(default=7 * 86400.0, gt=0, description="How long a browser stays signed in.")
    login_code_s: float = Field(default=900.0, gt=0, description="How long a sign-in link is valid.")
    tls_cert: Path | None = Field(default=None, description="PEM file of the certificate chain to serve HTTPS with.")
    tls_key: Path | None = Field(default=None, description="PEM file of its private key.")
    behind_proxy: bool = Field(
        default=False,
        description="Whether a proxy that speaks TLS is in front: then plain HTTP may leave this machine.",
    )
    trusted_proxies: str = Field(
        default="127.0.0.1", description="Addresses or networks, by commas, whose X-Forwarded- headers are believed."
    )
    file_roots: str = Field(
        default="",
        description="Folders, by colons, below which jobs may name places (file://); none: nowhere; /: everywhere.",
    )
    ambient_storage: str | None = Field(
        default=None,
        description="Buckets, by commas, that jobs may name without a storage profile, and reach with the credentials "
        "that are around: s3://bucket or s3://bucket/prefix; s3://: all; empty: none. Default: all while nobody beyond "
        "this machine can ask, else none.",
    )
    oidc_issuer: str | None = Field(default=None, description="The OpenID provider that people sign in with.")
    oidc_client_id: str | None = Field(default=None, description="As whom it knows this server.")
    oidc_client_secret: SecretStr | None = Field(default=None, description="The secret of that client, if it has one.")
    oidc_scopes: str = Field(default="openid email profile", description="What it is asked for, by spaces.")
    oidc_admins: str = Field(
        default="", description="Verified e-mail addresses, by commas, of those who administer this server."
    )
    oidc_audience: str | None = Field(
        default=None, description="The `aud` of access tokens of that provider that are taken as bearer tokens."
    )
    max_streams: int = Field(
        default=2000, ge=0, description="How many event streams one process of this server holds open in all."
    )
    max_streams_each: int = Field(
        default=256, ge=0, description="How many event streams one token or person may have open at one process."
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="How long the head of a request, and then its body, may take to come before it is refused.",
    )
    max_body_bytes: int = Field(default=16 * 1024 * 1024, gt=0, description="Largest request body.")

    @property
    def data_path(self) -> Path:
        return self.data_dir.expanduser().absolute()

    @property
    def tokens_path(self) -> Path | None:
        return None if self.tokens_dir is None else self.tokens_dir.expanduser().absolute()

    @property
    def admin_addresses(self) -> frozenset[str]:
        return frozenset(address.strip().lower() for address in self.oidc_admins.split(",") if address.strip())

    @property
    def places(self) -> Places:
        roots = tuple(Path(root).expanduser().absolute() for root in self.file_roots.split(":") if root)
        return Places(roots=roots, buckets=self._buckets)

    @property
    def is_exposed(self) -> bool:
        """Whether others than this machine may ask: it listens beyond it, or for a proxy that does."""
        return self.behind_proxy or not is_loopback(self.host)

    @property
    def _buckets(self) -> Buckets:
        if self.ambient_storage is None:
            return Buckets(allowed=() if self.is_exposed else EVERYWHERE)
        return read_buckets(self.ambient_storage)

    @field_validator("ambient_storage")
    @classmethod
    def _check_ambient_storage(cls, value: str | None) -> str | None:
        if value is not None:
            read_buckets(value)
        return value

    @field_validator("tracking_hosts")
    @classmethod
    def _check_tracking_hosts(cls, value: str) -> str:
        named_origins(_listed(value))
        return value

    @model_validator(mode="after")
    def _check_mail(self) -> Self:
        _ = self.mail
        return self

    @property
    def mail(self) -> MailServer | None:
        """Raises ValueError with what is wrong."""
        if self.smtp_url is None:
            return None
        try:
            return mail_server(self.smtp_url.get_secret_value(), self.mail_from, _listed(self.mail_domains))
        except ValueError as error:
            raise ValueError(f"SHOAL_SMTP_URL {error}") from error

    @property
    def trackers(self) -> TrackingHosts:
        """MLFLOW_TRACKING_URI may be a file or a database, too, which is no host."""
        own = origin_of(os.environ.get("MLFLOW_TRACKING_URI", ""))
        named = named_origins(_listed(self.tracking_hosts)) | ({own} if own else frozenset())
        return TrackingHosts(named=named, allow_private=self.tracking_private)

    @property
    def traces_endpoint(self) -> str | None:
        """As OpenTelemetry's own variables have it: one of them is the URL, the other one what it begins with."""
        common = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        derived = None if not common else f"{common.rstrip('/')}/v1/traces"
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or derived

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data_path / 'shoal.db'}"


# By itself MLflow tries for a quarter of an hour; we try again ourselves. Nor do we have tools tell others of our use.
_WRITER_DEFAULTS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def secrets_held() -> frozenset[str]:
    """The values of all variables of this process whose names are those of secrets."""
    return frozenset(value for name, value in os.environ.items() if looks_secret(name) and value)


# What a process needs to run, and to tell whom it speaks to; in none of it are credentials of a tracker.
_PLAIN = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
# Libraries look for credentials in files below it, too: .netrc, .mlflow/credentials, .aws.
_NO_HOME = "/nonexistent"


def writer_environment(reach: Reach) -> dict[str, str]:
    """Of a process that writes to a tracker. With credentials tools find their keys and settings in it; without, there
    are none, neither in variables nor in the files that these lead to, and no proxy."""
    if reach.credentials:
        return {**_WRITER_DEFAULTS, **os.environ}
    plain = {name: value for name, value in os.environ.items() if name in _PLAIN or name.startswith("LC_")}
    return {**_WRITER_DEFAULTS, **plain, "HOME": _NO_HOME, "PYTHONUSERBASE": site.getuserbase()}


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
