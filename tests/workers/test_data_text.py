"""Tokenizers, chats and packing: what becomes of a document, and which of its tokens are to be learnt."""

from __future__ import annotations

import argparse
import itertools
import json
import json.decoder
import typing
from pathlib import Path

import numpy as np
import pytest
from data_ground import documents, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoal_workers.answer_tokens import PlacedTokens
from shoal_workers.chat import CHATML, ChatTemplate, open_template
from shoal_workers.documents import Blocks, Encoded, Encoder, Raw
from shoal_workers.lines import JsonLines, TextBlocks
from shoal_workers.packing import Packed, Packer
from shoal_workers.tokenizing import ByteTokenizer, FileTokenizer, open_tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small", template=CHATML)


def encoded(ids: list[int], place: int = 0, learnt: bool = True) -> Encoded:
    tokens = np.array(ids, dtype=np.int32)
    return Encoded(tokens if learnt else ~tokens, place)


def every(blocks: Blocks, block: int, place: int | None = 0) -> list[Raw]:
    found = []
    while place is not None:
        chunk = blocks.read(block, place)
        found += chunk.documents
        place = chunk.end
    return found


def pack(documents: list[Encoded], seq_len: int, skip: int, pad: int, *, whole: bool) -> list[Packed]:
    packer, found = Packer(seq_len, skip, pad, whole=whole), []
    for document in documents:
        packer.add([document])
        while (packed := packer.next()) is not None:
            found.append(packed)
    last = packer.end()
    assert packer.end() is None
    return found if last is None else [*found, last]


@given(lengths=st.lists(st.integers(0, 40), max_size=20), seq_len=st.integers(1, 30), cut=st.integers(0, 40))
def test_packed_sequences_are_the_documents_and_go_on_from_anywhere(lengths: list[int], seq_len: int, cut: int) -> None:
    starts = list(itertools.accumulate(lengths, initial=0))
    parts = [encoded(list(range(start, end)), place) for place, (start, end) in enumerate(itertools.pairwise(starts))]
    packed = pack(parts, seq_len, 0, 999, whole=True)
    if starts[-1] > seq_len:
        assert [one.tokens.tolist() for one in packed] == [
            list(range(first, first + seq_len + 1)) for first in range(0, starts[-1] - seq_len, seq_len)
        ]
    elif starts[-1] > 1:
        assert [one.tokens.tolist() for one in packed] == [[*range(starts[-1]), *[~999] * (seq_len + 1 - starts[-1])]]
    else:
        assert packed == []
    if cut < len(packed) - 1:
        at = packed[cut]
        rest = pack(parts[at.place :], seq_len, at.skip, 999, whole=False)
        assert [one.tokens.tolist() for one in rest] == [one.tokens.tolist() for one in packed[cut + 1 :]]


def test_what_has_nothing_to_learn_is_not_filled_up() -> None:
    assert pack([encoded([1, 2, 3], learnt=False)], 8, 0, 9, whole=True) == []


def test_ids_are_those_of_the_library_however_long_a_text_is(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder), None, 512)
    assert isinstance(tokenizer, FileTokenizer)
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    texts = [*documents(50), "", "\n".join(documents(3000))]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids.tolist() == inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.end == inner.token_to_id("<|endoftext|>")
    whole = tokenizer.encode(["x" * 200_000])[0]
    assert inner.decode(whole.tolist()) == "x" * 200_000, "no line end to cut it at"
    alone = open_tokenizer(str(folder / "tokenizer.json"), "<|im_end|>", 512)
    assert alone.end == inner.token_to_id("<|im_end|>")


def test_a_document_ends_and_its_first_token_is_no_target() -> None:
    encoder = Encoder(ByteTokenizer(), None)
    one, empty, part = encoder.encode(
        [Raw("abc", 0, "f", "line 1"), Raw("", 4, "f", "line 2"), Raw("de", 5, "f", "byte 5", begins=False, ends=False)]
    )
    assert (one.ids.tolist(), one.learnt.tolist()) == ([97, 98, 99, 0], [False, True, True, True])
    assert (empty.ids.tolist(), empty.learnt.tolist()) == ([0], [False])
    assert (part.ids.tolist(), part.learnt.tolist()) == ([100, 101], [True, True])


def test_a_document_begins_as_the_tokenizer_has_texts_begin(folder: Path, tmp_path: Path) -> None:
    """Each once, as does what goes on behind a cut; a chat as its template has it."""
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    begin, word = inner.token_to_id("<|im_start|>"), inner.encode("abc").ids
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", begin), ("<|im_end|>", begin + 1)]
    )
    inner.save(str(tmp_path / "words.json"))
    tokenizer = open_tokenizer(str(tmp_path / "words.json"), "<|endoftext|>", 512)
    assert tokenizer.begin == (begin,)
    one, written, part = Encoder(tokenizer, None).encode(
        [
            Raw("abc", 0, "f", "line 1"),
            Raw("<|im_start|>abc", 4, "f", "line 2"),
            Raw("abc", 5, "f", "byte 5", begins=False, ends=False),
        ]
    )
    assert one.ids.tolist() == written.ids.tolist() == [begin, *word, tokenizer.end]
    assert one.learnt.tolist() == written.learnt.tolist() == [False, *[True] * len(word), True]
    assert part.ids.tolist() == word
    (chat,) = Encoder(tokenizer, open_template("chatml", tokenizer)).encode([Raw(CHAT, 0, "f", "line 1")])
    assert chat.ids.tolist().count(begin) == len(CHAT)
    assert open_tokenizer(str(folder), None, 512).begin == ()


@pytest.mark.parametrize("name", ["chatml", "tokenizer"])
def test_only_answers_of_the_assistant_are_learnt(folder: Path, name: str) -> None:
    tokenizer = open_tokenizer(str(folder), None, 512)
    (found,) = Encoder(tokenizer, open_template(name, tokenizer)).encode([Raw(CHAT, 0, "f", "line 1")])
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    text = inner.decode(found.ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\nSo long.<|im_end|>\n<|endoftext|>")
    assert text.count("<|im_start|>") == 5
    learnt = inner.decode(found.ids[found.learnt].tolist(), skip_special_tokens=False)
    assert learnt == "Hello!<|im_end|>\nSo long.<|im_end|>\n"
    assert inner.token_to_id("<|im_end|>") in found.ids, "one token, not its letters"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}{{ loop.length }}{{ m['content'] | upper }}{% endfor %}", "none of which can"),
        ("{{ raise_exception('only two may talk') }}", "refuses them: only two may talk"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses them"),
        ("{{ messages[9]['content'] + 1 }}", "refuses them|cannot show them"),
    ],
)
def test_a_template_that_cannot_show_a_chat_says_why(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ChatTemplate(source, {}).show(CHAT)
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


class _Memory:
    """A file in memory."""

    relative = name = "f"
    version = tag = ""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_bytes = len(content)

    def read(self, offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset <= offset + num_bytes <= len(self.content)
        return self.content[offset : offset + num_bytes]

    def open(self) -> None:
        raise AssertionError


@given(
    files=st.lists(st.lists(st.text(max_size=30), min_size=1, max_size=12), min_size=1, max_size=4),
    block_bytes=st.integers(1, 400),
    ends=st.booleans(),
)
def test_each_line_is_in_one_block(files: list[list[str]], block_bytes: int, ends: bool) -> None:
    texts = ["\n".join(json.dumps({"t": line}) for line in lines) + ("\n" if ends else "") for lines in files]
    blocks = JsonLines([_Memory(text.encode()) for text in texts], block_bytes, "t")
    found = [raw for block in range(len(blocks)) for raw in every(blocks, block)]
    assert [raw.content for raw in found] == [line for lines in files for line in lines]
    assert [str(raw.where) for raw in found] == [f"line {n + 1}" for lines in files for n in range(len(lines))]
    for block in range(len(blocks)):
        whole = every(blocks, block)
        for index, raw in enumerate(whole):
            assert [one.content for one in every(blocks, block, raw.place)] == [one.content for one in whole[index:]]


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300)


@given(files=st.lists(_TEXT, min_size=1, max_size=4), block_bytes=st.integers(1, 400))
def test_each_byte_of_a_text_is_in_one_block(files: list[str], block_bytes: int) -> None:
    blocks = TextBlocks([_Memory(text.encode()) for text in files], block_bytes)
    found = [raw for block in range(len(blocks)) for raw in every(blocks, block)]
    assert "".join(str(raw.content) for raw in found) == "".join(files)
    assert sum(raw.begins for raw in found) == sum(raw.ends for raw in found) == len(files)


def test_a_text_without_line_ends_is_cut_between_characters() -> None:
    text = "ä€𐍈" * 60_000
    blocks = TextBlocks([_Memory(text.encode())], 100_000)
    found = [raw for block in range(len(blocks)) for raw in every(blocks, block)]
    assert "".join(str(raw.content) for raw in found) == text
    assert len(found) > 2


@pytest.fixture(params=["prepend", "metaspace first", "byte level"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path, folder: Path) -> Path:
    """A tokenizer in the manner of Llama 2 or of later SentencePiece models, or one of bytes."""
    if request.param == "byte level":
        return folder
    inner = Inner(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if request.param == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    special = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    inner.train_from_iterator((line for text in documents() for line in text.split(" ")), trainer)
    found = tmp_path / "pieces"
    found.mkdir()
    inner.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHATML}))
    return found


def test_a_chat_has_the_ids_that_the_library_gives_it(any_folder: Path) -> None:
    tokenizer = open_tokenizer(str(any_folder), None, 1000)
    template = open_template("tokenizer", tokenizer)
    inner = Inner.from_file(str(any_folder / "tokenizer.json"))
    for chat in ([*CHAT], [{"role": "user", "content": "Größe \ud83d"}, {"role": "assistant", "content": " Größe\n"}]):
        (found,) = Encoder(tokenizer, template).encode([Raw(chat, 0, "f", "line 1")])
        text = template.show(chat).text.replace("\ud83d", "\ufffd")
        assert found.ids.tolist() == [*inner.encode(text, add_special_tokens=False).ids, tokenizer.end]
        learnt = inner.decode(found.ids[found.learnt].tolist(), skip_special_tokens=False)
        answers = "".join(f"{one['content']}<|im_end|>\n" for one in chat if one["role"] == "assistant")
        assert learnt.replace(" ", "") == answers.replace(" ", "")


def test_tokens_begin_where_the_library_says(any_folder: Path) -> None:
    tokenizer = open_tokenizer(str(any_folder), None, 1000)
    texts = [*documents(40), "", " a  b\n\n", "Größe 😀 \ud83d \ufffd", "<|im_start|>a<|im_end|>\n", "x " * 3000]
    for text, (ids, places) in zip(texts, PlacedTokens(tokenizer).encode(texts), strict=True):
        wanted, begins = tokenizer.encode_with_places(text)
        assert (ids.tolist(), places.tolist()) == (wanted.tolist(), begins.tolist())


def test_a_long_text_has_the_ids_that_the_library_gives_it(any_folder: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(any_folder), None, 1000)
    inner = Inner.from_file(str(any_folder / "tokenizer.json"))
    text = "\n".join(documents(4000)).replace("\n\n", "\n")
    assert len(text) > 4 * 2**16
    wanted = inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode([text])[0].tolist() == wanted
    ids, places = tokenizer.encode_with_places(text)
    assert ids.tolist() == wanted
    assert places.tolist() == [begin for begin, _ in inner.encode(text, add_special_tokens=False).offsets]
    code = "".join(Path(module.__file__).read_text() for module in (argparse, json.decoder, typing))
    assert len(code) > 2**17, "with lines that are indented, empty, and long"
    assert tokenizer.encode([code])[0].tolist() == inner.encode(code, add_special_tokens=False).ids
    blocks, encoder = TextBlocks([_Memory(text.encode())], 100_000), Encoder(tokenizer, None)
    read = [encoded for block in range(len(blocks)) for encoded in encoder.encode(every(blocks, block))]
    assert len(read) > 5
    found = np.concatenate([one.ids for one in read])
    assert inner.decode(found.tolist()) == inner.decode(wanted)
    # What is white before a cut may have been one token with what is white behind it; but no begin is put there.
    assert abs(len(found) - len(wanted) - 1) <= (len(read) if any_folder.name == "small" else 0)


def test_of_a_template_with_generation_tags_what_stands_in_them_is_learnt() -> None:
    source = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% if loop.last %}<think>{% endif %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{% if tools is not none %}tools{% endif %}{% endfor %}"
    )
    shown = ChatTemplate(source, {}).show(CHAT)
    assert shown.text == "[system]Be short.[user]Hi[assistant]Hello![user]Bye[assistant]<think>So long."
    assert [shown.text[begin:end] for begin, end in shown.answers] == ["Hello!", "So long."]
    assert shown.ends


def test_a_byte_order_mark_is_no_text() -> None:
    blocks = TextBlocks([_Memory(b"\xef\xbb\xbfabc"), _Memory(b"d\xef\xbb\xbf")], 100)
    assert [raw.content for raw in every(blocks, 0)] == ["abc", "d\ufeff"]
