"""JobSpec: what a user asks for. Immutable; a change is a new job.

Fields of the published job format that Shoal does not support yet are refused here by name, never accepted and ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal_planner.architecture import ModelSpec as ModelSpec
from shoal_planner.code_spec import NO_CODE
from shoal_planner.code_spec import CodeSpec as CodeSpec
from shoal_planner.data_spec import NUM_BYTE_TOKENS, check_storage
from shoal_planner.data_spec import DataSpec as DataSpec
from shoal_planner.errors import InvalidField
from shoal_planner.labels import check_labels
from shoal_planner.limits import UNLIMITED, Priority, check_priority
from shoal_planner.limits import LimitsSpec as LimitsSpec
from shoal_planner.lora import Adapters, Base, LoraSpec, adapters_of
from shoal_planner.presets import spelled_out
from shoal_planner.ranges import Range, check_positive, check_range, check_ranges
from shoal_planner.strict import check_document, read
from shoal_planner.track_spec import UNTRACKED
from shoal_planner.track_spec import TrackSpec as TrackSpec
from shoal_planner.uris import parts_of

_MANY = 1_000_000_000
MOST_NAME = 100  # characters
TRAIN_RANGES: dict[str, Range] = {
    "global_batch": (1, 65_536),
    "seq_len": (1, 2**20),
    "steps": (1, _MANY),
    "warmup_steps": (0, _MANY),
    "seed": (0, 2**63 - 1),
    "init_step": (0, _MANY),
    "eval_every": (1, _MANY),
    "eval_batches": (1, _MANY),
}
CHECKPOINT_RANGES: dict[str, Range] = {name: (1, _MANY) for name in ("every_steps", "keep", "protect_every")}


# In which order a stage does its forwards and backwards (`orders`).
Schedule = Literal["1f1b", "interleaved", "zero_bubble"]
EVERY_STEPS = 100
KEEP = 3
EVAL_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """`global_batch` is in sequences, `seq_len` in tokens.

    The learning rate warms up linearly to `lr`, and then follows `lr_schedule` down to `min_lr`, or stays. Gradients
    whose norm over all weights is more than `clip_norm` are scaled down to it. Matrices decay, norms do not. After each
    `eval_every` steps, and after the last one, the loss over the same `eval_batches` global batches is evaluated.
    `gather`, `scatter` and `secondary_weights` say how plans that split weights or gradients pass them round. With
    `compile`, ranks compile what is between matrix products. `init_from` is where the first weights are: a Hugging Face
    folder, or a job's checkpoints (`STORE/JOB`), of which `init_step` is one. With `lora`, adapters are trained and
    those weights stay as they are.
    """

    global_batch: int
    seq_len: int
    steps: int
    lr: float = 3.0e-4
    warmup_steps: int = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: float = 0.0
    clip_norm: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    on_nan: Literal["fail", "skip"] = "fail"
    init_from: str | None = None
    init_step: int | None = None
    lora: LoraSpec | None = None
    deterministic: bool = False
    compile: bool = False
    eval_every: int | None = None
    eval_batches: int = EVAL_BATCHES
    sharding: Literal["auto", "none"] = "auto"
    gather: Literal["plain", "int8"] = "plain"
    scatter: Literal["plain", "int4"] = "plain"
    secondary_weights: bool = False
    recompute: Literal["auto", "none"] = "auto"
    overlap: Literal["auto", "none"] = "auto"
    schedule: Literal["1f1b", "auto", "interleaved", "zero_bubble"] = "1f1b"

    def __post_init__(self) -> None:
        check_ranges(self, TRAIN_RANGES)
        for name in ("lr", "eps"):
            check_positive(name, getattr(self, name))
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InvalidField("weight_decay", self.weight_decay, "must be zero or more")
        if self.init_from is not None and parts_of("init_from", self.init_from).scheme not in ("file", "s3"):
            raise InvalidField("init_from", self.init_from, "must begin with file:// or s3://")
        if self.init_from is None and self.init_step is not None:
            raise InvalidField("init_step", self.init_step, "needs train.init_from")
        if self.lora is not None and self.init_from is None:
            problem = "needs model.hf or train.init_from: beside weights that nobody trained adapters learn nothing"
            raise InvalidField("lora", f"rank {self.lora.rank}", problem)
        if self.lora is not None and self.schedule == "zero_bubble":
            problem = "puts gradients of weights off, and adapters (train.lora) have hardly any"
            raise InvalidField("schedule", self.schedule, problem)
        self._check_schedule()
        self._check_sharding()
        if self.eval_every is None and self.eval_batches != EVAL_BATCHES:
            raise InvalidField(
                "eval_batches", self.eval_batches, "needs train.eval_every: nothing is evaluated without"
            )
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise InvalidField(f"betas[{index}]", beta, "must lie in [0, 1)")

    def _check_schedule(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise InvalidField("min_lr", self.min_lr, f"must be zero or more, and at most lr ({self.lr:g})")
        if self.min_lr and self.lr_schedule == "constant":
            raise InvalidField("min_lr", self.min_lr, "needs lr_schedule 'linear' or 'cosine': a constant rate stays")
        if self.warmup_steps >= self.steps and self.lr_schedule != "constant":
            problem = f"must be less than steps ({self.steps}), or the {self.lr_schedule} schedule never begins"
            raise InvalidField("warmup_steps", self.warmup_steps, problem)

    def _check_sharding(self) -> None:
        for name, plain in (("gather", "plain"), ("scatter", "plain"), ("secondary_weights", False)):
            value = getattr(self, name)
            if self.sharding == "none" and value != plain:
                raise InvalidField(name, value, "needs train.sharding 'auto': with 'none' no weights are passed round")

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def evaluates_after(self, step: int) -> bool:
        if self.eval_every is None or step == 0:
            return False
        return step % self.eval_every == 0 or step == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where whole states go (`file:///folder` or `s3://bucket/prefix`), how often, and how many are kept.

    No `uri` means no object store: state then lives in the nodes' memory alone. `copies` is on how many *other* nodes
    each snapshot stands before its step counts as safe. `storage` is the project's profile that says how the bucket is
    reached.
    """

    uri: str | None = None
    storage: str | None = None
    every_steps: int = EVERY_STEPS
    keep: int = KEEP
    protect_every: int = 1
    copies: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.uri is not None and parts_of("uri", self.uri).scheme not in ("file", "s3"):
            raise InvalidField("uri", self.uri, "must begin with file:// or s3://")
        check_storage(self.storage, self.uri)
        check_ranges(self, CHECKPOINT_RANGES)
        if self.uri is None:
            for name, default in (("every_steps", EVERY_STEPS), ("keep", KEEP)):
                if getattr(self, name) != default:
                    raise InvalidField(name, getattr(self, name), "needs a checkpoint.uri: no state is stored without")
        if self.copies != "auto":
            check_range("copies", int(self.copies), 0, _MANY)

    @property
    def num_copies(self) -> int:
        return 1 if self.copies == "auto" else int(self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: str
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    limits: LimitsSpec = UNLIMITED
    checkpoint: CheckpointSpec = CheckpointSpec()
    code: CodeSpec = NO_CODE
    track: TrackSpec = UNTRACKED
    priority: Priority = "normal"
    labels: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_priority(self.priority)
        self.limits.check_store(self.checkpoint.uri)
        if not self.name or len(self.name) > MOST_NAME or not self.name.isprintable():
            raise InvalidField("name", self.name, f"must be 1 to {MOST_NAME} printable characters")
        check_labels(self.labels)
        self._check_own_code()
        adapters = self._adapters()
        if adapters != self.model.lora:
            object.__setattr__(self, "model", dataclasses.replace(self.model, lora=adapters))
        if self.data.reads_bytes and self.model.is_known and self.model.vocab < NUM_BYTE_TOKENS:
            problem = f"must be at least {NUM_BYTE_TOKENS} where the tokens are bytes"
            raise InvalidField("model.vocab", self.model.vocab, problem)
        for name, most in (("learned_positions", self.model.learned_positions), ("window", self.model.window)):
            if most is not None and self.train.seq_len > most:
                later = "" if name == "learned_positions" else "; narrower attention is not supported yet"
                problem = f"must be at most model.{name} ({most}){later}"
                raise InvalidField("train.seq_len", self.train.seq_len, problem)
        if self.data.eval_uri is not None and self.train.eval_every is None:
            raise InvalidField(
                "data.eval_uri", self.data.eval_uri, "needs train.eval_every: nothing is evaluated without"
            )

    def _check_own_code(self) -> None:
        if self.model.module is None:
            if self.code != NO_CODE:
                problem = "needs model.entrypoint: no code of yours runs without"
                raise InvalidField("code", dataclasses.asdict(self.code), problem)
            return
        if self.data.by_document:
            problem = "is not for modules of your own: they are given activations alone, and not where documents begin"
            raise InvalidField("data.attention", self.data.attention, problem)
        if self.train.compile:
            raise InvalidField("train.compile", True, "is not for modules of your own: compile them yourself")
        if self.train.schedule == "zero_bubble":
            raise InvalidField("train.schedule", "zero_bubble", "is not for modules of your own")
        if self.train.lora is not None:
            given = dataclasses.asdict(self.train.lora)
            raise InvalidField("train.lora", given, "is not for modules of your own: build them with adapters")

    def _adapters(self) -> Adapters | None:
        train = self.train
        if train.lora is None:
            return None
        assert train.init_from is not None
        base = Base(uri=train.init_from, step=train.init_step, fingerprint=train.lora.base)
        try:
            return adapters_of(train.lora, self.model.matrix_rows, self.model.hidden, base)
        except InvalidField as error:
            raise InvalidField(f"train.lora.{error.field}", error.value, error.problem) from error

    @property
    def eval_sequences(self) -> int:
        """That each evaluation is on."""
        return 0 if self.train.eval_every is None else self.train.eval_batches * self.train.global_batch

    @property
    def held_out_sequences(self) -> int:
        """Of the text that is trained on, which training leaves out."""
        return self.eval_sequences if self.data.eval_uri is None else 0


def parse_job(value: object) -> JobSpec:
    """The job in a mapping as it comes from YAML or JSON. Raises InvalidField."""
    value = _of_this_kind(check_document(value, "job"))
    if isinstance(value.get("model"), Mapping):
        if value["model"].get("lora") is not None:
            raise InvalidField("model.lora", value["model"]["lora"], "is what train.lora says: leave it out")
        value = {**value, "model": spelled_out(value["model"])}
    return read(JobSpec, value)


_NOT_HERE = "belongs to a job of kind 'ray_train'; one of kind 'train' has model, data and train"


def _of_this_kind(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Without its `kind`, which `script_spec` knows, too. Raises InvalidField."""
    if value.get("kind", "train") != "train":
        problem = "is a script of its user's: it has no model to plan for, and no state of Shoal's"
        raise InvalidField("kind", value["kind"], problem)
    for name in ("script", "workers", "metric"):
        if name in value:
            raise InvalidField(name, value[name], _NOT_HERE)
    return {name: item for name, item in value.items() if name != "kind"}


def job_to_mapping(job: JobSpec) -> dict[str, object]:
    """The inverse of `parse_job`: plain JSON values."""
    found = dataclasses.asdict(job)
    del found["model"]["lora"]  # train.lora says it
    if not job.data.by_document:
        del found["data"]["attention"]  # programs of before there was one read jobs, too (docs/adr/0058)
    return found
