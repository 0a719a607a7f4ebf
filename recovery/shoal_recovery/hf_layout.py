"""Where Hugging Face's formats have what a model of ours has: names, orientation and configs of the families.

Pure: it reads and writes nothing. Theirs differ in names, in whether a matrix is stored as [in, out] or [out, in], and
in whether queries, keys and values are one tensor. A family here is a `model_type` there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shoal_planner.architecture import Activation, Family, ModelSpec, RopeScaling
from shoal_planner.errors import InvalidField
from shoal_planner.own_model import OwnShape
from shoal_planner.parameters import Parameter, own_prefix
from shoal_planner.strict import read

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Shares of values that their trainings leave out at random, by what their classes take where a config does not say.
_DROPOUTS = {"attention_dropout": 0.0}
_GPT2_DROPOUTS = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THEIR_ACTIVATIONS: Mapping[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
# Of a block, by part of our names: theirs, and the number of the third that ours is of it, if it is one of three.
_LLAMA_PARTS: Mapping[str, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    **{f"attention.{name}": (f"self_attn.{name}_proj", None) for name in "qkvo"},
    **{f"attention.{name}_norm": (f"self_attn.{name}_norm", None) for name in "qk"},
    "mlp_norm": ("post_attention_layernorm", None),
    **{f"mlp.{name}": (f"mlp.{name}_proj", None) for name in ("gate", "up", "down")},
}
_GPT2_PARTS: Mapping[str, tuple[str, int | None]] = {
    "attention_norm": ("ln_1", None),
    **{f"attention.{name}": ("attn.c_attn", index) for index, name in enumerate("qkv")},
    "attention.o": ("attn.c_proj", None),
    "mlp_norm": ("ln_2", None),
    "mlp.up": ("mlp.c_fc", None),
    "mlp.down": ("mlp.c_proj", None),
}
_LLAMA_ENDS = {"embedding": "embed_tokens", "final_norm": "norm"}
_GPT2_ENDS = {"embedding": "wte", "positions": "wpe", "final_norm": "ln_f"}
_TURNED_BY_US = ("attention.o", "mlp.down")  # stored as [in, out] here


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter is. `turned`: theirs is the transpose of ours. `third` of `thirds`: ours is that part of their
    output dimension."""

    name: str
    turned: bool = False
    third: int = 0
    thirds: int = 1


def place_of(model: ModelSpec, parameter: Parameter) -> Place:
    """With the prefix that their loaders write; some files lack it (`bare`). Of modules of a user's own, the name that
    it has in an nn.ModuleList of them."""
    if (shape := model.own_shape) is not None:
        return _own_place(shape, parameter)
    owner, _, kind = parameter.fqn.rpartition(".")
    plain = model.family == "gpt2"
    prefix, ends = ("transformer.", _GPT2_ENDS) if plain else ("model.", _LLAMA_ENDS)
    if owner == "head":
        return Place(name=f"lm_head.{kind}")
    if owner in ends:
        return Place(name=f"{prefix}{ends[owner]}.{kind}")
    _, layer, part = owner.split(".", 2)
    theirs, third = (_GPT2_PARTS if plain else _LLAMA_PARTS)[part]
    name = f"{prefix}{'h' if plain else 'layers'}.{layer}.{theirs}.{kind}"
    # Llama's are [out, in], GPT-2's [in, out]; ours are [out, in] but for two.
    turned = len(parameter.shape) == 2 and plain != (part in _TURNED_BY_US)
    return Place(name=name, turned=turned) if third is None else Place(name=name, turned=turned, third=third, thirds=3)


def _own_place(shape: OwnShape, parameter: Parameter) -> Place:
    unit = parameter.units[0]
    name = parameter.fqn.removeprefix(own_prefix(shape, unit))
    (cut,) = (one.cut for one in shape.unit(shape.kind(unit)).parameters if one.name == name)
    return Place(name=f"{unit}.{name}", turned=cut == "row" and len(parameter.shape) == 2)


def also_named(model: ModelSpec, parameter: Parameter) -> tuple[str, ...]:
    """Under which names besides, where loaders want all places of a weight that two modules share."""
    if (shape := model.own_shape) is None or len(parameter.units) == 1:
        return ()
    return tuple(f"{shape.layers + 1}.{mine}" for mine, theirs in shape.tied if parameter.fqn == f"first.{theirs}")


def names_of(place: Place, parameter: Parameter) -> tuple[str, ...]:
    """Under which names files may have it, their loaders' choice first: those saved without a head lack the prefix, and
    some have a tied embedding as the head alone."""
    bare = place.name.removeprefix("model.").removeprefix("transformer.")
    tied = parameter.fqn == "embedding.weight" and len(parameter.units) > 1
    return (place.name, bare, *(("lm_head.weight",) if tied else ()))


def model_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelSpec for a config.json. Raises InvalidField, naming what Shoal cannot train."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InvalidField("model_type", kind, f"is none of {', '.join(FAMILIES)}")
    if isinstance(quantised := config.get("quantization_config"), Mapping):
        method = quantised.get("quant_method", "by what is not said")
        problem = f"says that it is quantised ({method}), which is not trained: take the model that it was made from"
        raise InvalidField("quantization_config", quantised, problem)
    found = _of_gpt2(config) if kind == "gpt2" else _of_llama(config, kind)
    return {"family": kind, **found}


# What their classes take where a config does not say.
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}


def _of_llama(config: Mapping[str, Any], kind: Family) -> dict[str, Any]:
    config = {**_DEFAULTS.get(kind, {}), **config}
    biased = kind in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    scaling = _scaling_of(config)
    window, window_layers = _window(config, kind)
    return {
        "layers": _required(config, "num_hidden_layers"),
        "hidden": _required(config, "hidden_size"),
        "heads": _required(config, "num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn": _required(config, "intermediate_size"),
        "vocab": _required(config, "vocab_size"),
        "activation": _activation(config, "hidden_act", "silu"),
        "qkv_bias": kind == "qwen2" or biased,
        "out_bias": biased,
        "mlp_bias": kind == "llama" and bool(config.get("mlp_bias", False)),
        "qk_norm": kind == "qwen3",
        "window": window,
        "window_layers": window_layers,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": _theta(config),
        "rope_scaling": None if scaling is None else dataclasses.asdict(scaling),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def _of_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    for name, usual in (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True)):
        if config.get(name, usual) != usual:
            raise InvalidField(name, config[name], "is not supported")
    hidden = _required(config, "n_embd")
    return {
        "layers": _required(config, "n_layer"),
        "hidden": hidden,
        "heads": _required(config, "n_head"),
        "ffn": config.get("n_inner") or 4 * hidden,
        "vocab": _required(config, "vocab_size"),
        "gated_mlp": False,
        "activation": _activation(config, "activation_function", "gelu_new"),
        "norm": "layer",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "learned_positions": _required(config, "n_positions"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def dropouts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """By their names, of a config.json of a known family, or of what was kept of one. Nothing here does any."""
    kind = config.get("model_type")
    usual = (_GPT2_DROPOUTS if kind == "gpt2" else _DROPOUTS) if kind in FAMILIES else {}
    return usual | {name: config[name] for name in (*_DROPOUTS, *_GPT2_DROPOUTS) if name in config}


def config_of_model(
    model: ModelSpec, positions: int | None, said: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A config.json with which transformers loads what is exported; `positions` is how long its contexts may be. What
    is `said` of other things than shapes (`hf_beside`) counts more. Raises InvalidField for a model whose options its
    family does not have there. Of modules of a user's own it says which they are, to people."""
    if model.module is not None:
        return {"entrypoint": model.module.entrypoint, "arguments": model.module.called_with}
    if model.family == "gpt2":
        config = _as_gpt2(model)
    else:
        if model.family == "llama" and model.hidden % model.heads:
            raise InvalidField("model.heads", model.heads, f"must divide hidden ({model.hidden}) in their Llama")
        reach = max(positions or 0, stretched(model.rope_scaling))
        config = _as_llama(model) | ({"max_position_embeddings": reach} if reach else {})
    general = {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "float32",
    }
    found: dict[str, Any] = general | config
    _check_same(model, found)
    return {**found, **said}


def stretched(scaling: RopeScaling | None) -> int:
    """How long the contexts are that positions are stretched to. Some of their loaders take the factor from this."""
    if scaling is None or scaling.original_positions is None:
        return 0
    return int(scaling.factor * scaling.original_positions)


def _as_llama(model: ModelSpec) -> dict[str, Any]:
    assert model.activation is not None
    return {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": _THEIR_ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else _as_scaling(model.rope_scaling),
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "sliding_window": model.window,
        **(_as_qwen_windows(model) if model.family.startswith("qwen") else {}),
    }


def _as_qwen_windows(model: ModelSpec) -> dict[str, Any]:
    if model.window is None:
        return {"use_sliding_window": False}
    kinds = [_FULL if model.window_of(layer) is None else _SLIDING for layer in range(model.layers)]
    return {"use_sliding_window": True, "max_window_layers": 0, "layer_types": kinds}


def _as_gpt2(model: ModelSpec) -> dict[str, Any]:
    assert model.activation is not None
    return {
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.learned_positions,
        "activation_function": _THEIR_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _check_same(model: ModelSpec, config: Mapping[str, Any]) -> None:
    """Read back, a config must be the model: or its family lacks an option there."""
    back = read(ModelSpec, model_of_config(config))
    for field in dataclasses.fields(model):
        ours, theirs = getattr(model, field.name), getattr(back, field.name)
        if ours != theirs:
            problem = f"is {theirs!r} in every {model.family} of Hugging Face's"
            raise InvalidField(f"model.{field.name}", ours, problem)


def _scaling_of(config: Mapping[str, Any]) -> RopeScaling | None:
    given = config.get("rope_scaling") or _rope(config)
    if not isinstance(given, Mapping):
        raise InvalidField("rope_scaling", given, "must be a mapping")
    for name, usual in (("mscale", None), ("mscale_all_dim", None), ("truncate", True), ("partial_rotary_factor", 1.0)):
        if given.get(name, usual) not in (usual, None):
            raise InvalidField(f"rope_scaling.{name}", given[name], "is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise InvalidField("rope_scaling.rope_type", kind, "is none of linear, llama3, yarn")
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    fields = {name: value for name, value in given.items() if name in known and value is not None}
    if kind != "yarn":
        fields.pop("attention_factor", None)  # they pay no heed to it either
    original = given.get("original_max_position_embeddings")
    if kind != "linear" and original is None:
        original = config.get("max_position_embeddings")
    return read(RopeScaling, {"kind": kind, "original_positions": original} | fields, "rope_scaling")


def _as_scaling(scaling: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions is not None:
        found["original_max_position_embeddings"] = scaling.original_positions
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
    for name in names.get(scaling.kind, ()):
        if getattr(scaling, name) is not None:
            found[name] = getattr(scaling, name)
    return found


def _theta(config: Mapping[str, Any]) -> float:
    found: float = config.get("rope_theta", _rope(config).get("rope_theta", 10000.0))
    return found


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer configs have all about rotary positions in one place."""
    return config.get("rope_parameters") or {}


def _window(config: Mapping[str, Any], kind: Family) -> tuple[int | None, tuple[int, ...] | None]:
    """How wide, and of which layers, where not all have one: those that the config lists, or else those from
    `max_window_layers` on. In Mistral all or none have one."""
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, Sequence) and set(kinds) <= {_FULL, _SLIDING}):
        raise InvalidField("layer_types", kinds, f"must be a list of {_FULL} and {_SLIDING}")
    used = kind != "llama" and config.get("use_sliding_window", kind == "mistral")
    window: int | None = config.get("sliding_window")
    count = _required(config, "num_hidden_layers")
    first = (config.get("max_window_layers") or 0) if kind.startswith("qwen") else 0
    if kinds is None or kind == "mistral":  # whose classes pay no heed to the list
        sliding = tuple(range(first, count))
    else:
        sliding = tuple(layer for layer, each in enumerate(kinds) if each == _SLIDING)
    if not used or window is None or not sliding:
        return None, None
    return window, None if len(sliding) == count else sliding


def _activation(config: Mapping[str, Any], name: str, usual: str) -> Activation:
    given = config.get(name, usual)
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise InvalidField(name, given, f"is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def _required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidField(name, value, "must be a whole number")
    return value
