"""What a folder of Hugging Face's says of how tokens are chosen: what `shoal generate` does of it, and what not.

Pure. Which ids end a text is `hf_beside`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_planner.errors import show
from shoal_planner.ranges import check_positive
from shoal_planner.strict import number
from shoal_recovery.hf_beside import GENERATION, Files, generation_said

_PENALTY = "repetition_penalty"
# What changes which token is chosen there, each with the value at which it does not; without one there is none.
_OF_ALL: dict[str, object] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
}
_OF_DRAWN: dict[str, object] = {
    "top_k": 0,
    "top_p": 1,
    "top_h": None,
    "min_p": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}


def repetition_penalty(files: Files) -> float:
    """1: none. Raises InvalidField."""
    said = generation_said(files).get(_PENALTY)
    if said is None:
        return 1.0
    field = f"{GENERATION}: {_PENALTY}"
    found = number(said, field)
    check_positive(field, found)
    return found


def passed_over(files: Files, drawn: bool) -> tuple[str, ...]:
    """What else is said of choosing tokens, of which nothing is done, as a note to people, if there is any; `drawn`:
    tokens are not always the likeliest. Raises InvalidField."""
    said: Mapping[str, Any] = generation_said(files)
    neutral = _OF_ALL | _OF_DRAWN if drawn else _OF_ALL
    found = [
        f"{name} = {show(said[name])}" for name, value in neutral.items() if said.get(name) not in (value, None, [], {})
    ]
    if not found:
        return ()
    return (f"{GENERATION} says {', '.join(found)}, which is not done here: transformers may go on otherwise",)
