"""JobSpec: what a user asks for. Immutable; a change is a new job.

Fields of the published job format that Shoal does not support yet are refused here by name, never accepted and ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from shoal_planner.errors import InvalidField
from shoal_planner.strict import check_document, read


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidField(name, value, f"must be at least {least}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(name, value, "must be more than zero")


NUM_BYTE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. `ffn` is the inner width of the gated MLP, `vocab` the number of token ids."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    family: Literal["llama"] = "llama"
    kv_heads: int | None = None
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            _at_least(name, getattr(self, name), 1)
        if self.hidden % self.heads:
            raise InvalidField("heads", self.heads, f"must divide hidden ({self.hidden})")
        if self.head_dim % 2:
            raise InvalidField("heads", self.heads, f"hidden / heads is {self.head_dim}; rotary positions need it even")
        if self.heads % self.num_kv_heads:
            raise InvalidField("kv_heads", self.kv_heads, f"must divide heads ({self.heads})")
        _positive("rope_theta", self.rope_theta)
        _positive("norm_eps", self.norm_eps)

    @property
    def num_kv_heads(self) -> int:
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where the training text is. `stdlib:` is the source of the running Python's standard library, read as bytes;
    `file:///path` one text file or a folder of text files."""

    uri: str
    tokenizer: str = "bytes"

    def __post_init__(self) -> None:
        scheme = urlsplit(self.uri).scheme
        if scheme not in ("stdlib", "file"):
            raise InvalidField(
                "uri", self.uri, "must begin with stdlib: or file:// (other places are not supported yet)"
            )
        if self.tokenizer != "bytes":
            raise InvalidField("tokenizer", self.tokenizer, "only 'bytes' is supported yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """`global_batch` is in sequences, `seq_len` in tokens. The learning rate warms up linearly, then stays."""

    global_batch: int
    seq_len: int
    steps: int
    lr: float = 3.0e-4
    warmup_steps: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    on_nan: str = "fail"
    sharding: Literal["auto", "none"] = "auto"
    recompute: Literal["auto", "none"] = "auto"
    overlap: Literal["auto", "none"] = "auto"

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len", "steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "eps"):
            _positive(name, getattr(self, name))
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InvalidField("weight_decay", self.weight_decay, "must be zero or more")
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise InvalidField(f"betas[{index}]", beta, "must lie in [0, 1)")
        if self.on_nan != "fail":
            raise InvalidField("on_nan", self.on_nan, "only 'fail' is supported yet")

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSpec:
    """What a plan of this job may use. No `device_types` means every type."""

    device_types: tuple[str, ...] = ()
    max_price_per_hour: float | None = None
    deadline: str | None = None
    min_devices: int = 1

    def __post_init__(self) -> None:
        _at_least("min_devices", self.min_devices, 1)
        if self.max_price_per_hour is not None:
            raise InvalidField(
                "max_price_per_hour", self.max_price_per_hour, "is not supported yet; leave it out or null"
            )
        if self.deadline is not None:
            raise InvalidField("deadline", self.deadline, "is not supported yet; leave it out or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where whole states go (`file:///folder` or `s3://bucket/prefix`), how often, and how many are kept.

    No `uri` means no object store: state then lives in the nodes' memory alone. `copies` is on how many *other* nodes
    each snapshot stands before its step counts as safe.
    """

    uri: str | None = None
    every_steps: int = 100
    keep: int = 3
    protect_every: int = 1
    copies: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.uri is not None and urlsplit(self.uri).scheme not in ("file", "s3"):
            raise InvalidField("uri", self.uri, "must begin with file:// or s3://")
        for name in ("every_steps", "keep"):
            _at_least(name, getattr(self, name), 1)
        if self.protect_every != 1:
            raise InvalidField("protect_every", self.protect_every, "only 1 is supported yet")
        if self.copies != "auto":
            _at_least("copies", self.copies, 0)

    @property
    def num_copies(self) -> int:
        return 1 if self.copies == "auto" else int(self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: str
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    limits: LimitsSpec = LimitsSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 100 or not self.name.isprintable():
            raise InvalidField("name", self.name, "must be 1 to 100 printable characters")
        if self.model.vocab < NUM_BYTE_TOKENS:
            problem = f"must be at least {NUM_BYTE_TOKENS} where the tokens are bytes"
            raise InvalidField("model.vocab", self.model.vocab, problem)


def parse_job(value: object) -> JobSpec:
    """The job in a mapping as it comes from YAML or JSON. Raises InvalidField."""
    check_document(value, "job")
    if isinstance(value, Mapping) and isinstance(value.get("model"), Mapping):
        for name in ("preset", "hf", "entrypoint"):
            if name in value["model"]:
                raise InvalidField(
                    f"model.{name}", value["model"][name], "is not supported yet; give family, layers, hidden ..."
                )
    return read(JobSpec, value)


def job_to_mapping(job: JobSpec) -> dict[str, object]:
    """The inverse of `parse_job`: plain JSON values."""
    return dataclasses.asdict(job)
