"""ModelSpec: the shape of a model and the options of its block. The published families differ in these alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.lora import Adapters
from shoal_planner.own_model import OwnModule, OwnShape
from shoal_planner.ranges import Range, check_positive, check_range, check_ranges

# Far above what is trained today, and low enough that the planner's arithmetic stays a matter of seconds.
MODEL_RANGES: dict[str, Range] = {
    "layers": (1, 2000),
    "hidden": (1, 2**18),
    "heads": (1, 2**14),
    "kv_heads": (1, 2**14),
    "ffn": (1, 2**21),
    "vocab": (1, 2**24),
    "head_dim": (1, 2**18),
    "learned_positions": (1, 2**24),
    "window": (1, 2**24),
}
ROPE_THETA = 10000.0
Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched to contexts `factor` times as long as those trained on before.

    `linear` divides positions (Chen et al. 2023), `llama3` slows down pairs that turn less than `low_freq_factor` times
    within `original_positions`, and leaves those that turn more than `high_freq_factor` times (Llama 3.1), `yarn` does
    so between `beta_slow` and `beta_fast` turns and scales what was turned by `attention_factor` (Peng et al. 2023, by
    default 0.1 ln(factor) + 1).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise InvalidField("factor", self.factor, "must be 1 or more")
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)
        if self.original_positions is not None:
            check_range("original_positions", self.original_positions, 1, 2**24)
        elif self.kind != "linear":
            raise InvalidField("original_positions", None, f"is required where kind is {self.kind!r}")
        if self.low_freq_factor >= self.high_freq_factor:
            problem = f"must be less than high_freq_factor ({self.high_freq_factor:g})"
            raise InvalidField("low_freq_factor", self.low_freq_factor, problem)
        if self.attention_factor is not None and self.kind != "yarn":
            raise InvalidField("attention_factor", self.attention_factor, "needs kind 'yarn'")
        if self.beta_slow >= self.beta_fast:
            raise InvalidField("beta_slow", self.beta_slow, f"must be less than beta_fast ({self.beta_fast:g})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. `ffn` is the inner width of the MLP, `vocab` the number of token ids. A gated MLP has
    three matrices, the other two. The published families differ in options alone, and `family` names the one whose
    formats a model is brought in and taken away in.

    Positions are rotary, or else rows of a table of `learned_positions`. `qk_norm`: each head's queries and keys are
    normed before they are turned. `norm` is the root mean square (a weight), or LayerNorm (a weight and a bias).
    `qkv_bias`, `out_bias` (of attention) and `mlp_bias` say which products have biases. `window`: how many positions
    back, its own among them, attention reaches; all of them by default. `window_layers`: the blocks, from 0, that
    it holds for; by default all. With `lora`, which follows from a job's
    `train.lora`, adapters are trained and nothing else. Of a `module` of the user's own nothing but layers, hidden,
    vocab and, as what tensor parallelism divides, heads is so.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    family: Family = "llama"
    kv_heads: int | None = None
    head_dim: int | None = None
    gated_mlp: bool = True
    activation: Activation | None = None
    norm: Literal["rms", "layer"] = "rms"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    learned_positions: int | None = None
    tie_embeddings: bool = True
    rope_theta: float = ROPE_THETA
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    module: OwnModule | None = None
    lora: Adapters | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.activation is None:
            object.__setattr__(self, "activation", "silu" if self.gated_mlp else "gelu")
        check_ranges(self, MODEL_RANGES)
        if self.head_dim is None and self.hidden % self.heads:
            raise InvalidField("heads", self.heads, f"must divide hidden ({self.hidden}), or head_dim must be given")
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.learned_positions is None and self.head_size % 2:
            derived = self.head_size * self.heads == self.hidden
            name = "heads" if derived else "head_dim"
            problem = f"makes heads {self.head_size} wide; rotary positions need it even"
            raise InvalidField(name, getattr(self, name), problem)
        if self.learned_positions is not None:
            for name, usual in (("rope_theta", ROPE_THETA), ("rope_scaling", None)):
                if getattr(self, name) != usual:
                    problem = "needs rotary positions: leave learned_positions out"
                    raise InvalidField(name, getattr(self, name), problem)
        if self.heads % self.num_kv_heads:
            raise InvalidField("kv_heads", self.kv_heads, f"must divide heads ({self.heads})")
        if self.window_layers is not None:
            self._check_window_layers(self.window_layers)
        check_positive("rope_theta", self.rope_theta)
        check_positive("norm_eps", self.norm_eps)

    def _check_window_layers(self, layers: tuple[int, ...]) -> None:
        if self.window is None:
            raise InvalidField("window_layers", list(layers), "needs window")
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.layers:
            problem = f"must be numbers of blocks, from 0 to {self.layers - 1}, in order"
            raise InvalidField("window_layers", list(layers), problem)

    def window_of(self, layer: int) -> int | None:
        """How far back attention of this block reaches, from 0."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @property
    def num_kv_heads(self) -> int:
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @property
    def block_options(self) -> str:
        """What a block has otherwise than Llama's, but for its shape: "" of a Llama."""
        if self.module is not None:
            return f"module={hashlib.blake2b(repr(self.module).encode(), digest_size=8).hexdigest()}"
        usual = {"gated_mlp": True, "norm": "rms", "qkv_bias": False, "out_bias": False, "mlp_bias": False}
        usual |= {"qk_norm": False, "activation": "silu"}
        options = [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        if self.lora is not None:
            options.append(f"lora={self.lora.rank}:{','.join(self.lora.names)}")
        return " ".join(options)

    @property
    def trains(self) -> str:
        """Nothing where all weights of a model of ours are; at its ends nothing is where adapters are. Modules of the
        user's own are what they are."""
        if self.module is not None:
            return self.block_options
        return "" if self.lora is None else "adapters"

    @property
    def matrix_rows(self) -> dict[str, int]:
        """Of a block: the rows of each matrix as it is stored, with `hidden` columns."""
        inner = ("gate", "up") if self.gated_mlp else ("up",)
        attention = {"q": self.query_width, "k": self.key_width, "v": self.key_width, "o": self.query_width}
        return {f"attention.{name}": rows for name, rows in attention.items()} | {
            f"mlp.{name}": self.ffn for name in (*inner, "down")
        }

    @property
    def is_known(self) -> bool:
        """Whether its shape is: that of a user's own module is not, before a worker looked at it."""
        return self.module is None or self.module.shape is not None

    @property
    def own_shape(self) -> OwnShape | None:
        """None unless the model is a module of the user's. Raises InvalidField where nobody has looked at that yet."""
        if self.module is None or self.module.shape is not None:
            return None if self.module is None else self.module.shape
        problem = "has to be looked at where it is trained, before anything can be planned"
        raise InvalidField("model.entrypoint", self.module.entrypoint, problem)

    @property
    def query_width(self) -> int:
        """Of all heads."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Of keys, and of values."""
        return self.num_kv_heads * self.head_size
