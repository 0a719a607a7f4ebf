"""What the operator of a node may set; the only place in this package that reads the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class WorkerSettings(BaseSettings):
    """Read from SHOAL_WORKER_... when an agent, rank, supervisor or connector starts."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_WORKER_", frozen=True)

    memory_dir: Path = Path("/dev/shm/shoal")
    """Snapshots live here, one folder per cluster and node. Must be memory (tmpfs)."""
    disk_dir: Path = Path("/var/tmp/shoal")
    """Journals, state on its way to the object store, of the newest step that is whole there and of up to four
    later ones, one folder per cluster and node; and snapshots for which there is no room in memory. In `data`, what
    jobs read from object stores."""
    disk_limit_bytes: int = 64 * 2**30
    """How much of the disk snapshots, and then state that the object store has, may take; 0: neither lies there."""
    data_cache_bytes: int = 16 * 2**30
    """How much of the disk data that jobs read from object stores may take, for all jobs of the node; 0: none."""
    log_limit_bytes: int = 2**28
    """How much of the disk lines that processes printed may take before they are fetched; the oldest are dropped."""
    bind_host: str = "0.0.0.0"
    """Where agents and ranks listen."""
    advertise_host: str | None = None
    """Where peers reach them; none means the address that Ray knows the node by."""
    heartbeat_s: float = 0.1
    """How often agents and ranks show that they live."""
    silence_s: float = 2.0
    """Silence of this length counts as death when one observer sees it."""
    silence_confirmed_s: float = 0.5
    """Silence of this length counts as death when a second observer hears nothing, or sees trouble, too."""
    cut_off_s: float = 10.0
    """Who was not answered for so long votes no more; a supervisor that sees no rank of its job waits for this."""
    ends_itself_s: float = 60.0
    """After so long without an answer agents and ranks end, to be started anew once they can be reached again."""
    orphaned_s: float = 600.0
    """How long ranks step on after the process of their supervisor has ended. A supervisor that comes after it, and
    reaches no rank of the job, waits for this before it takes them for lost."""
    group_timeout_s: float = 60.0
    """The last net under every wait of a collective; death is noticed long before."""
    stalled_s: float = 600.0
    """After how long in which no rank says anything, although all show life, an epoch is begun anew; longer where
    steps are long; 0: never."""
    reply_timeout_s: float = 30.0
    """How long a change of plan waits for any word, of an answer or of progress, of a member that still shows life."""
    apart_s: float = 300.0
    """How long a job does without a node that another one of its nodes does not reach, before that is tried again."""
    inventory_timeout_s: float = 300.0
    """How long it waits until an agent has looked through the snapshots that it keeps."""
    metadata_url: str = "http://169.254.169.254"
    """Where the cloud of this machine tells what it is going to do with it (AWS, GCP, Azure)."""
    notice_period_s: float = 2.0
    """How often it is asked; 0: never."""
    kubernetes_node: str | None = None
    """The name of the Kubernetes node that this one runs on, where it does; none: it is not asked about."""
    kubernetes_pod: str | None = None
    """The name of its pod; none: it is not asked about."""
    kubernetes_url: str = "https://kubernetes.default.svc"
    """Where the API of that Kubernetes cluster answers."""
    kubernetes_account_dir: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """What a pod is given to ask it with: `token`, `namespace` and `ca.crt`."""
    kubernetes_period_s: float = 5.0
    """How often it is asked whether node or pod are to go away; 0: never."""
    last_step_wait_s: float = 3600.0
    """How long a job that has done all steps waits while nothing of the last one arrives in its object store."""
    notice_overdue_s: float = 60.0
    """How long after its announced end a node that is still there is not used."""
    simulate_devices: bool = False
    """A node whose label says that its devices are GPUs, and that shows none, computes on its CPU; else it is left
    out."""
    link_limit_s: float = 1.0
    """How long links between nodes are measured before a job begins; 0: what labels and the catalogue say is taken."""


class NodeSettings(BaseSettings):
    """Read from SHOAL_NODE_... when deploy/start-worker.sh or deploy/start-head.sh makes this machine a node: what it
    is labelled with (shoal_workers.node_options). In docs/deploying.md."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_NODE_", frozen=True)

    device: str | None = None
    """The type of its devices, a name of the catalogue; a head without one computes nothing."""
    devices: int | None = None
    """How many; none: the NVIDIA devices that the machine shows, or one of a `cpu-...`."""
    name: str | None = None
    """By which Shoal calls the node; none: the host name."""
    pool: str | None = None
    """The pool that it belongs to, of which an autoscaler can be asked for more."""
    zone: str | None = None
    """Nodes of one zone fail together; none: what its cloud says."""
    spot: bool | None = None
    """Whether it may be taken away; none: what its cloud says."""
    labels: str = ""
    """Other fields of a node, as FIELD=VALUE by commas: price-per-hour=1.21,inter-bytes-per-s=1.25e9."""
    address: str | None = None
    """Where the other nodes reach it; none: the address from which it reaches the head."""
    object_store_bytes: int = 2**30
    """Memory for Ray's own object store, of which Shoal needs little: Ray would take 30 % of all."""
    override_labels: str | None = Field(default=None, validation_alias="RAY_OVERRIDE_LABELS")
    """What Ray's cluster launcher labels the node with, as JSON; it goes before the rest."""


class HeadSettings(BaseSettings):
    """What Ray's own environment says of the head of its cluster: where the head keeps what it knows."""

    model_config = SettingsConfigDict(frozen=True)

    redis_address: str | None = Field(default=None, validation_alias="RAY_REDIS_ADDRESS")
    """An external Redis."""
    gcs_storage: str = Field(default="memory", validation_alias="RAY_gcs_storage")
    """`rocksdb` on a disk that outlives the head; `memory` where there is no Redis either."""


class ProvisionerSettings(BaseSettings):
    """Who gets nodes for this cluster, read where `shoal connect` runs, or else where its connector does."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True)

    provisioner: Literal["none", "ray", "kuberay"] = "none"
    """`ray`: Ray's autoscaler; `kuberay`: KubeRay, by the worker groups of a RayCluster."""
    provisioner_pools: Path | None = None
    """The POOLS file: which pools there are, in docs/files.md."""
    provisioner_raycluster: str | None = None
    """The name of the RayCluster; needed by `kuberay`."""
