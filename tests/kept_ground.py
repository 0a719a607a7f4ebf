"""A model and its tokenizer as transformers leaves them, and what it says from a prompt, for tests of what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT = "{% for message in messages %}{{ message['content'] }}<|over|>{% endfor %}"
PROMPT = "import o"


def words(file: Path) -> Path:
    """Bytes, and the tokens <|begin|> (260) and <|over|> (261)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {letter: number for number, letter in enumerate(letters)} | {
        f"<{number}>": number for number in range(256, 260)
    }
    made = Tokenizer(models.BPE(vocab=known, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|begin|>", "<|over|>"])
    made.save(str(file))
    return file


def source(folder: Path) -> Path:
    """A model that says its ends early, with its tokenizer."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=262,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=260,
        eos_token_id=261,
        pad_token_id=259,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(4 if tensor.ndim > 1 else 1)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|over|>"}
    folder.mkdir()
    text = words(folder / "tokenizer.json").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT)
    prompt = torch.tensor([Tokenizer.from_str(text).encode(PROMPT).ids])
    free = model.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=[-1], pad_token_id=0)
    model.generation_config.eos_token_id = [261, int(free[0, prompt.shape[1] + 5])]
    model.save_pretrained(folder)
    return folder


def goes_on(folder: Path) -> list[int]:
    """By what the folder says alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt", add_special_tokens=False)
    found = model.generate(prompt["input_ids"], max_new_tokens=32, do_sample=False)
    return [int(token) for token in found[0, prompt["input_ids"].shape[1] :]]
