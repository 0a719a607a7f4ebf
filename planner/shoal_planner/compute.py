"""Operations of the parts of a model, and the seconds that a device needs for them where nothing was measured.

Owns the analytic forward and its constants. Does not own exchanges between devices (`costs`) nor measured seconds
(`profile`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_planner.catalogue import DeviceType
from shoal_planner.job import ModelSpec
from shoal_planner.memory import ELEMENT_BYTES, part_elements
from shoal_planner.parameters import without_adapters
from shoal_planner.profile import Part

# Operations per backward for one per forward: the gradient of the input and of the weight. Without the latter where a
# weight is frozen.
BACKWARD_FACTOR = 2.0
# Elements read and written per token of a block by everything that is no matmul: in widths of the residual stream
# (norms, residual sums, dropout, rotary embedding), ...
RESIDUAL_WIDTHS = 20
# ... and cut by tensor parallelism: of the residual stream (q, k, v and their gradients) and of the MLP's inner width.
CUT_WIDTHS = 3
FFN_WIDTHS = 4
# Of modules of a user's own, what their backward needs is read and written so often.
OWN_PASSES = 2
# In widths of the residual stream, what each slice more of an operator reads and writes: its input, its output, and the
# sum of outputs that this is added to. A block has attention and an MLP.
SLICE_WIDTHS = 4
BLOCK_OPERATORS = 2
# Logits are read and written this often, in fp32.
LOGIT_PASSES = 2
# Of the datasheet's memory rate a stream of reads and writes reaches this share.
BANDWIDTH_SHARE = 0.85
# Kernels in a block's forward, and in an end of the model.
BLOCK_KERNELS = 40
EDGE_KERNELS = 8
# A matmul reaches half of its rate at this inner width, or at this number of tokens, times the peak in TFLOPS: a
# faster device has more or wider units to fill. Both add to its seconds, so that a higher peak never slows it.
HALF_WIDTH_PER_TFLOP = 1.0
HALF_TOKENS_PER_TFLOP = 0.25


_OWN: Mapping[Part, str] = {"embedding": "first", "block": "block", "head": "last"}


def matmul_flops(model: ModelSpec, part: Part, seq_len: int) -> float:
    """Operations of one sample's forward: two per weight and token, and the quadratic part of attention. Those of
    modules of a user's own were counted; at another length of sequence they are taken to be as many per token."""
    if (shape := model.own_shape) is not None:
        return shape.unit(_OWN[part]).flops * seq_len / shape.seq_len
    match part:
        case "block":
            keys = model.key_width
            weights = model.hidden * (2 * model.query_width + 2 * keys + (3 if model.gated_mlp else 2) * model.ffn)
            attention = 4.0 * seq_len * seq_len * model.query_width
            return 2.0 * seq_len * weights + attention + _adapter_flops(model, seq_len)
        case "embedding":
            return 0.0
        case "head":
            return 2.0 * seq_len * model.hidden * model.vocab


def _adapter_flops(model: ModelSpec, seq_len: int) -> float:
    """Of all adapters of a block, whose weights are the only ones with gradients."""
    if model.lora is None:
        return 0.0
    widths = sum(model.matrix_rows[name] + model.hidden for name in model.lora.names)
    return 2.0 * seq_len * model.lora.rank * widths


def backward_factor(model: ModelSpec, part: Part, seq_len: int) -> float:
    """Operations of a part's backward for one of its forward."""
    if model.lora is None:
        return BACKWARD_FACTOR
    match part:
        case "block":
            twice = 4.0 * seq_len * seq_len * model.query_width + _adapter_flops(model, seq_len)
            return 1 + twice / matmul_flops(model, part, seq_len)
        case "embedding":
            return 0.0
        case "head":
            return 1.0


def model_flops(model: ModelSpec, seq_len: int) -> float:
    """Operations that training on one sample needs: a forward and a backward, without any recomputation."""
    parts: tuple[tuple[Part, int], ...] = (("block", model.layers), ("head", 1))
    return sum(
        count * matmul_flops(model, part, seq_len) * (1 + backward_factor(model, part, seq_len))
        for part, count in parts
    )


def weight_share(model: ModelSpec, part: Part, seq_len: int) -> float:
    """Of the operations of a backward, those for gradients of weights that may be put off: as many as the forward has
    with these weights. None at the ends: to put off the head's would mean to keep the gradients of its logits; and none
    of frozen weights, or of modules of a user's own."""
    if part != "block" or model.lora is not None or model.module is not None:
        return 0.0
    whole = matmul_flops(model, part, seq_len)
    return (1 - 4.0 * seq_len * seq_len * model.query_width / whole) / BACKWARD_FACTOR


def forward_seconds(
    device: DeviceType,
    model: ModelSpec,
    part: Part,
    precision: str,
    seq_len: int,
    tp: int,
    samples: int,
    slices: int = 1,
) -> float:
    """Matmuls at a share of the peak, less for narrow matrices and few tokens; then memory and kernel starts. A part
    in `slices` has narrower matrices, more kernels, and outputs that are added up.

    A share that the cluster file states is what the user's job achieves: it holds for every shape, and includes memory
    and kernel starts.
    """
    peak = device.flops_per_s("bf16" if precision == "bf16" else "fp32")
    ends_whole = model.module is not None and part != "block"
    flops = matmul_flops(model, part, seq_len) * samples / (1 if ends_whole else tp)
    if device.efficiency_stated:
        return flops / (peak * device.efficiency)
    width, tokens = min(model.hidden, model.ffn / tp / slices), seq_len * samples
    idle = (HALF_WIDTH_PER_TFLOP / width + HALF_TOKENS_PER_TFLOP / tokens) * peak / 1e12
    touched = touched_bytes(model, part, precision, seq_len, tp, samples, device.passes)
    if slices > 1:
        operators = BLOCK_OPERATORS if part == "block" else 1
        touched += (slices - 1) * operators * SLICE_WIDTHS * tokens * model.hidden * ELEMENT_BYTES[precision]
    memory_s = touched / (device.memory_bytes_per_s * BANDWIDTH_SHARE)
    kernels = slices * (BLOCK_KERNELS if part == "block" else EDGE_KERNELS)
    return flops / (peak * device.efficiency) * (1 + idle) + memory_s + kernels * device.kernel_s


def touched_bytes(
    model: ModelSpec, part: Part, precision: str, seq_len: int, tp: int, samples: int, passes: float
) -> float:
    """Bytes of memory that the forward of a part reads and writes beside its matmuls, and its weights once; activations
    of a block `passes` times as often."""
    tokens, size = seq_len * samples, ELEMENT_BYTES[precision]
    weights = part_elements(without_adapters(model), part, tp) * size
    if (shape := model.own_shape) is not None:  # what is kept was written, and most of it read again
        return weights + passes * OWN_PASSES * samples * shape.unit(_OWN[part]).kept_bytes * seq_len / shape.seq_len
    match part:
        case "block":
            inner = FFN_WIDTHS if model.gated_mlp else FFN_WIDTHS - 1
            cut = (CUT_WIDTHS * model.query_width + inner * model.ffn) / tp
            return weights + passes * tokens * size * (RESIDUAL_WIDTHS * model.hidden + cut)
        case "embedding":
            return weights + tokens * size * 2 * model.hidden
        case "head":
            return weights + tokens * 4 * LOGIT_PASSES * model.vocab / tp
