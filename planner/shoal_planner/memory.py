"""Bytes that a rank keeps, exactly as the engine allocates them, and bytes that a node's agent keeps.

Small pure functions; the constants on top are the ones that measurements of the engine calibrate. Does not own which
units a rank holds (`parameters`) nor how much memory there is (`catalogue`, `cluster`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.catalogue import DeviceType
from shoal_planner.cluster import GIB
from shoal_planner.job import ModelSpec
from shoal_planner.orders import InFlight
from shoal_planner.parameters import parameters, without_adapters
from shoal_planner.plan import Recompute
from shoal_planner.profile import Part
from shoal_planner.slices import Slicing, largest_portion

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
GRADIENT_BYTES = 4  # accumulated in fp32 whatever the weights are
OPTIMIZER_BYTES = 12  # master, exp_avg, exp_avg_sq, in fp32
STATE_BYTES = 12  # these three in snapshots and where they lie on hosts, apart from any weights
SNAPSHOT_SLOTS = 2  # the newest safe step, and the one being written
# Of snapshots and of state on hosts, while a plan changes: those of the old epoch stay until the new one steps.
GENERATIONS = 2
# Of the largest unit: its gradients received from peers and its gathered weights, each at most whole.
STAGING_COPIES = 2
# Where gradients stay whole, what is sent and what is received of two units at once, in the precision of the job.
SUMMED_UNITS = 2
# Units whose weights are whole for a moment where they are sharded: the one in use, and the next one. Of gradients the
# one that a backward makes.
GATHERED_UNITS = 2
SCATTERED_UNITS = 1
# What autograd keeps of a block, in widths of the residual stream: input and output of both norms (never cut by tp) ...
NORM_WIDTHS = 4
# ... per query width: q and what attention makes of it; per key width: k and v, which are as wide as queries where they
# are copied for all heads, as GPUs' kernels for 32 bits need; of queries and keys that are normed by head what enters
# the norm; per inner width of a gated MLP: gate, up, silu(gate), product; of the other: up, gelu(up).
QUERY_WIDTHS = 2
KEY_WIDTHS = 2
HEAD_NORM_WIDTHS = 1
FFN_WIDTHS = 4
PLAIN_FFN_WIDTHS = 2
# Selective recomputation keeps what matmuls gave and computes again what norms and activation functions made of it.
SELECTIVE_NORM_WIDTHS = 2
SELECTIVE_FFN_WIDTHS = 2
SELECTIVE_PLAIN_FFN_WIDTHS = 1
# Per token in fp32: of each norm its mean and its deviation, or that alone; of each head the logarithm of what its
# softmax divides by.
STATISTIC_BYTES = 4
BLOCK_NORMS = 2
# For gradients of weights that are put off: the inputs of a block's matmuls and the gradients of their outputs. As
# Qi et al. 2024 count them (32 of a plain block's 34 bytes per token and width), by the widths that they have here.
WEIGHT_NORM_WIDTHS = 4
WEIGHT_QUERY_WIDTHS = 2
WEIGHT_KEY_WIDTHS = 2
WEIGHT_FFN_WIDTHS = 3
WEIGHT_PLAIN_FFN_WIDTHS = 2
# Over what was measured of a user's own block, which may keep other things in other precisions.
OWN_MARGIN = 1.05
# Logits, their softmax and their gradient, in fp32, for one micro-batch. One of them is kept of others whose backward
# does not come next, as with more chunks of layers in a stage, with what enters the head's norm and leaves it.
LOGIT_COPIES = 3
HEAD_WIDTHS = 2
# Buffers at the borders of a stage: what enters, what leaves and the gradient that goes back, per micro-batch in
# flight; one more of the first and the last, and two gradients that are received ahead.
BORDER_COPIES = 3
BORDER_EXTRA = 4
# The widest moment of a backward: the gradients of one block's activations.
BACKWARD_BLOCKS = 1
# With recomputation, what its forward was run again for.
RECOMPUTED_BLOCKS = 1
# Kept free: fragmentation everywhere, and a GPU's context and libraries.
HEADROOM_SHARE = 0.05
GPU_CONTEXT_BYTES = GIB * 6 // 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak bytes of one rank by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    staging: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.staging + self.activations


def usable_bytes(device: DeviceType) -> float:
    """What a plan may use of a device."""
    context = 0 if device.threads is not None else GPU_CONTEXT_BYTES
    return max(0.0, device.memory_bytes * (1 - HEADROOM_SHARE) - context)


@functools.lru_cache(maxsize=4096)
def part_elements(model: ModelSpec, part: Part, tp: int) -> int:
    """Trained elements that tp rank 0 of `tp` holds of a block, the embedding, or final norm and head (tied: its own
    copy)."""
    unit = {"embedding": 0, "block": 1, "head": model.layers + 1}[part]
    found = 0
    for parameter in parameters(model):
        if unit in parameter.units:
            # The last tp rank has the largest slice of rows that do not divide evenly, the first the norms: count both.
            first, last = parameter.interval(tp - 1, tp)
            found += last - first
    return found


def unit_elements(model: ModelSpec, unit: int, tp: int) -> int:
    """Elements of a unit that a rank synchronises; a tied embedding's weight counts in unit 0 alone."""
    if unit == 0:
        return part_elements(model, "embedding", tp)
    if unit <= model.layers:
        return part_elements(model, "block", tp)
    return part_elements(model, "head", tp) - tied_elements(model, tp)


@functools.lru_cache(maxsize=4096)
def tied_elements(model: ModelSpec, tp: int) -> int:
    """Elements that both ends of the model use."""
    shared = [parameter.interval(tp - 1, tp) for parameter in parameters(model) if len(parameter.units) > 1]
    return sum(last - first for first, last in shared)


def held_elements(model: ModelSpec, tp: int, layers: int, *, embedding: bool, head: bool) -> int:
    """Trained elements that a rank of a stage holds. A rank with both ends of a tied embedding holds it once."""
    held = layers * part_elements(model, "block", tp)
    held += part_elements(model, "embedding", tp) if embedding else 0
    held += part_elements(model, "head", tp) if head else 0
    return held - (tied_elements(model, tp) if embedding and head else 0)


def frozen_elements(model: ModelSpec, tp: int, layers: int, *, embedding: bool, head: bool) -> int:
    """Those that a rank of a stage computes with and does not train; never split, whatever else is."""
    if model.lora is None:
        return 0
    return held_elements(without_adapters(model), tp, layers, embedding=embedding, head=head)


def block_activation_bytes(model: ModelSpec, seq_len: int, precision: str, tp: int, recompute: Recompute) -> float:
    """What a block keeps from its forward to its backward, for one sample. With full recomputation: its input alone.
    Of a module of a user's own, what was measured of a whole one, and nothing less selectively."""
    size = ELEMENT_BYTES[precision]
    if recompute == "full":
        return float(seq_len * size * model.hidden)
    if (shape := model.own_shape) is not None:
        kept_bytes = shape.block.kept_bytes * size / 4 * seq_len / shape.seq_len  # was in fp32, and without its input
        return OWN_MARGIN * kept_bytes + seq_len * size * model.hidden
    selective = recompute == "selective"
    norms = (SELECTIVE_NORM_WIDTHS if selective else NORM_WIDTHS) * size * model.hidden
    if model.gated_mlp:
        ffn = SELECTIVE_FFN_WIDTHS if selective else FFN_WIDTHS
    else:
        ffn = SELECTIVE_PLAIN_FFN_WIDTHS if selective else PLAIN_FFN_WIDTHS
    normed = HEAD_NORM_WIDTHS if model.qk_norm else 0
    keys = model.query_width if precision == "fp32" else model.key_width
    cut = QUERY_WIDTHS * model.query_width + KEY_WIDTHS * keys + normed * (model.query_width + model.key_width)
    between = 0 if model.lora is None else size * model.lora.rank * len(model.lora.names)  # two adapters
    by_head = model.heads + (model.heads + model.num_kv_heads if model.qk_norm else 0)
    by_token = 0 if selective else BLOCK_NORMS * (2 if model.norm == "layer" else 1)
    statistics = STATISTIC_BYTES * (by_token + by_head / tp)
    head_norms = 2 * size * model.head_size if model.qk_norm else 0  # of queries and keys, side by side
    return head_norms + seq_len * (norms + between + statistics + size * (cut + ffn * model.ffn) / tp)


def block_weight_bytes(model: ModelSpec, seq_len: int, precision: str, tp: int) -> float:
    """What a block keeps from the gradient of its input to those of its weights, for one sample."""
    ffn = WEIGHT_FFN_WIDTHS if model.gated_mlp else WEIGHT_PLAIN_FFN_WIDTHS
    cut = WEIGHT_QUERY_WIDTHS * model.query_width + WEIGHT_KEY_WIDTHS * model.key_width
    widths = WEIGHT_NORM_WIDTHS * model.hidden + (cut + ffn * model.ffn) / tp
    return float(seq_len * ELEMENT_BYTES[precision] * widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What a rank's memory consists of, so that sums over layers are products: bytes at the borders of a stage, once
    and of each micro-batch in flight (`flight`), of the head's logits, of a block's backward, of each block's
    activations per micro-batch in flight and kind of recomputation, of what the head keeps of one that waits for its
    backward, and of buffers for exchanges (`staging`). In elements: the state of the ends and of each block, and the
    largest unit; what is frozen in bytes.
    """

    end_elements: int
    block_elements: int
    border: float
    logits: float
    backward: float
    flight: float
    block_flight: Mapping[Recompute, float]
    head_flight: float
    largest: int
    state_size: int
    frozen_ends: float
    frozen_block: float

    @property
    def staging(self) -> float:
        """Where weights and gradients are whole."""
        return SUMMED_UNITS * STAGING_COPIES * (self.state_size - GRADIENT_BYTES) * self.largest

    def once(self, exchanged: float, *, again: bool = False) -> float:
        """Beside what is kept, at the widest moment: in the backward of the head, or in that of a block (`again`: whose
        forward runs again), with so many bytes for exchanges. None are under way beside logits, unless
        every micro-batch has some: gradients of the last one are summed once they are there, the head's first."""
        blocks = BACKWARD_BLOCKS + (RECOMPUTED_BLOCKS if again else 0)
        return self.border + max(self.logits, exchanged + blocks * self.backward)

    @property
    def again(self) -> float:
        """How much more that is if anything is recomputed."""
        return self.once(self.staging, again=True) - self.once(self.staging)

    def per_block(self, holders: float) -> float:
        """State of a block whose optimizer state `holders` replicas share."""
        return self.frozen_block + self.block_elements * (self.state_size + OPTIMIZER_BYTES / holders)

    def empty(self, holders: float) -> float:
        """A stage without blocks and without a micro-batch in flight."""
        state = self.end_elements * (self.state_size + OPTIMIZER_BYTES / holders)
        return self.once(self.staging) + self.frozen_ends + state


@functools.lru_cache(maxsize=65536)
def stage_bytes(
    model: ModelSpec,
    seq_len: int,
    precision: str,
    tp: int,
    samples: int,
    *,
    embedding: bool,
    head: bool,
) -> StageBytes:
    size = ELEMENT_BYTES[precision]
    parts: list[Part] = ["block"]
    parts += ["embedding"] if embedding else []
    parts += ["head"] if head else []
    largest = max(part_elements(model, part, tp) for part in parts)
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    kept = {kind: samples * block_activation_bytes(model, seq_len, precision, tp, kind) for kind in kinds}
    border = samples * seq_len * model.hidden * size
    whole = 1 if model.module is not None else tp  # nobody cuts the logits of a user's own module
    logits = samples * LOGIT_COPIES * 4 * seq_len * model.vocab / whole if head else 0.0
    return StageBytes(
        end_elements=held_elements(model, tp, 0, embedding=embedding, head=head),
        block_elements=part_elements(model, "block", tp),
        border=BORDER_EXTRA * border,
        logits=logits,
        backward=kept["none"],
        flight=BORDER_COPIES * border,
        block_flight=kept,
        head_flight=logits / LOGIT_COPIES + (HEAD_WIDTHS * border if head else 0.0),
        largest=largest,
        state_size=size + GRADIENT_BYTES,
        frozen_ends=size * frozen_elements(model, tp, 0, embedding=embedding, head=head),
        frozen_block=size * frozen_elements(model, tp, 1, embedding=False, head=False),
    )


def stage_memory(
    model: ModelSpec,
    seq_len: int,
    precision: str,
    *,
    tp: int,
    samples: int,
    in_flight: int,
    layers: Mapping[Recompute, int],
    embedding: bool,
    head: bool,
    owned: float,
    offloaded: float = 0.0,
    weights: float = 1.0,
    gradients: float = 1.0,
    near: float = 0.0,
    whole: int = 0,
    slices: int = 1,
) -> StageMemory:
    """Peak bytes of a rank that owns the optimizer state of `owned` elements, `offloaded` of them on the host, and runs
    `layers` blocks with each kind of recomputation. It keeps these parts of its `weights` and `gradients`; the rest is
    made whole one unit, or slice of a unit, at a time; but for `whole` of the blocks, of which it keeps all. `near` is
    what it keeps besides of the weights that its node gathered.

    Linear in `layers`: the largest unit counts a block even where a stage holds none.
    """
    line = stage_bytes(model, seq_len, precision, tp, samples, embedding=embedding, head=head)
    kept_whole = whole * line.block_elements
    split = line.end_elements + sum(layers.values()) * line.block_elements - kept_whole
    size = ELEMENT_BYTES[precision]
    kept = in_flight * sum(count * line.block_flight[kind] for kind, count in layers.items())
    portion: float = (
        line.largest if slices == 1 else _largest_portion(model, tp, slices, embedding=embedding, head=head)
    )
    gathered = portion * (GATHERED_UNITS * size * (weights < 1) + SCATTERED_UNITS * GRADIENT_BYTES * (gradients < 1))
    # At the end of a step, parts of whole units are exchanged, as large as are kept.
    exchanged = max(portion, line.largest * max(weights, gradients), line.block_elements if whole else 0)
    again = bool(layers.get("full", 0) or layers.get("selective", 0))
    are_whole = weights == gradients == 1  # else every micro-batch exchanges, beside logits, too
    staged = line.staging if are_whole else STAGING_COPIES * GRADIENT_BYTES * exchanged
    beside = staged if are_whole else 0.0
    return StageMemory(
        weights=size * (split * (weights + near) + kept_whole)
        + line.frozen_ends
        + sum(layers.values()) * line.frozen_block,
        gradients=GRADIENT_BYTES * (split * gradients + kept_whole),
        optimizer=(owned - offloaded) * OPTIMIZER_BYTES,
        staging=staged + gathered,
        activations=kept + in_flight * line.flight + line.once(beside, again=again) - beside,
    )


def _largest_portion(model: ModelSpec, tp: int, slices: int, *, embedding: bool, head: bool) -> int:
    units = [1, *([0] if embedding else []), *([model.layers + 1] if head else [])]
    return max(largest_portion(model, unit, Slicing(slices=slices, tp=tp)) for unit in units)


def kept_bytes(
    line: StageBytes, moment: InFlight, chunks: Sequence[Mapping[Recompute, int]], weight_bytes: float
) -> float:
    """What all micro-batches keep at a moment of a schedule: `chunks` are layers by their kind of recomputation,
    `weight_bytes` what one that waits for gradients of weights keeps."""
    kept = moment.weight * weight_bytes + moment.waiting * line.head_flight
    for number, layers in zip(moment.forward, chunks, strict=True):
        kept += number * (line.flight + sum(count * line.block_flight[kind] for kind, count in layers.items()))
    return kept


def snapshot_bytes(elements: float) -> float:
    """Host memory that snapshots of this much optimizer state take, a node's own and what it keeps for others alike."""
    return GENERATIONS * SNAPSHOT_SLOTS * STATE_BYTES * elements


def hosted_bytes(elements: float, unit: float) -> float:
    """Host memory that a rank takes for the optimizer state of so many elements, of which it has at most `unit` of one
    unit of the model: that state, and the buffer through which its gradients and weights pass."""
    return STATE_BYTES * elements + GRADIENT_BYTES * min(elements, unit)
