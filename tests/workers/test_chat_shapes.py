"""Chats as people keep them, shown as transformers shows them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from data_ground import job, write_tokenizer

from shoal_planner.data_spec import DataSpec
from shoal_workers.chat import CHATML, ChatTemplate, open_template
from shoal_workers.data import training_samples
from shoal_workers.errors import DataError
from shoal_workers.tokenizing import open_tokenizer

Chat = Sequence[Mapping[str, Any]]

# In the manner of those that know tools, roles and parts.
TOOLS = """{{ bos_token }}{%- set ns = namespace(count=0) %}
{%- if tools %}{{- 'tools:' }}{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '\n[' ~ message.role ~ ' ' ~ ns.count ~ ']' }}
    {%- if message.reasoning_content is defined %}{{- '(' ~ message.reasoning_content ~ ')' }}{%- endif %}
    {%- if message.content is string %}{{- message.content }}
    {%- elif message.content is defined %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' }}
        {{- call | tojson(indent=2) }}{{- call | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
    {%- endfor %}
    {{- '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\n[assistant ' ~ (ns.count + 1) ~ ']' }}{%- endif %}"""
DATED = """{% for message in messages %}
    {% if message.role == 'assistant' %}
{% set seen = 'outside' %}
{% generation %}{% set seen = 'inside' %}{{ message.content }}{% endgeneration %}{{ seen }}
    {% else %}
{{ strftime_now('%d %b %Y') }} {{ dict(a=message.content).a }} {{ dict.fromkeys(['x'], 1).x }}
    {% endif %}
{% endfor %}"""
PLAIN = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
CALLING: Chat = [
    {"role": "user", "content": "What <b>weather</b> is it & where's Größe?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"z": "<Größe> & 'q'", "a": None}}}
        ],
    },
    {"role": "tool", "content": "3 °C", "name": "weather"},
    {"role": "assistant", "thinking": "cold", "content": "It is cold."},
]
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "Ä": ["<z>", "a"]}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


def theirs(folder: Path, source: str, chat: Chat, tools: list[Any] | None = None) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|endoftext|>"
    )
    found = tokenizer.apply_chat_template(chat, tools=tools, chat_template=source, tokenize=False)
    assert isinstance(found, str)
    return found


def ours(source: str, chat: object, tools: object = None) -> tuple[str, list[str]]:
    """All of it, and what is learnt."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    shown = ChatTemplate(source, special).show(chat, tools)
    return shown.text, [shown.text[begin:end] for begin, end in shown.answers]


@pytest.mark.parametrize("tools", [None, [], WEATHER])
@pytest.mark.parametrize(
    "chat",
    [
        CALLING,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "system", "content": "c"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        ],
    ],
)
@pytest.mark.parametrize("source", [TOOLS, CHATML])
def test_chats_look_as_transformers_shows_them(folder: Path, source: str, chat: Chat, tools: list[Any] | None) -> None:
    if source == CHATML and "image" in repr(chat):
        with pytest.raises(ValueError, match=r"chatml shows text alone, not {'type': 'image'}"):
            ours(source, chat, tools)
        return
    text, learnt = ours(source, chat, tools)
    assert text == theirs(folder, source, chat, tools)
    assert len(learnt) == sum(message["role"] == "assistant" for message in chat)
    assert ours(source, json.dumps(chat), json.dumps(tools)) == (text, learnt), "as JSON in a text"


def test_functions_and_tags_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Day:
            return cls(2024, 7, 26)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text, _ = ours(DATED, chat)
    assert text == theirs(folder, DATED, chat)
    assert text.startswith("26 Jul 2024 a 1\n")
    assert "boutside" in text


def test_a_template_stores_nothing_hidden_in_a_namespace() -> None:
    with pytest.raises(ValueError, match=r"refuses them: .*underscore"):
        ChatTemplate("{% set ns = namespace(__class__=1) %}", {}).show(CALLING)


def test_chatml_shows_all_that_there_is() -> None:
    chat = [{"role": "system", "content": "Be short."}, *CALLING]
    text, learnt = ours(CHATML, chat, WEATHER)
    assert text.startswith(
        "<|im_start|>system\nBe short.\n\n# Tools\n\n<tools>\n" + json.dumps(WEATHER[0], ensure_ascii=False)
    )
    assert text.count("Be short.") == 1
    assert learnt == [
        '<tool_call>\n{"name": "weather", "arguments": {"z": "<Größe> & \'q\'", "a": null}}\n</tool_call><|im_end|>\n',
        "<think>\ncold\n</think>\n\nIt is cold.<|im_end|>\n",
    ]
    assert "<|im_start|>tool\n3 °C<|im_end|>\n" in text
    with pytest.raises(ValueError, match="chatml has no function_call"):
        ours(CHATML, [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}])


def test_a_template_that_knows_no_parts_gets_their_text() -> None:
    """Where transformers would show the list itself, as Python writes it."""
    part = {"type": "text", "text": "hi"}
    chat = [{"role": "user", "content": [part, part]}, {"role": "assistant", "content": [part]}]
    assert ours(PLAIN, chat)[0] == "[user]hihi\n[assistant]hi\n"
    with pytest.raises(ValueError, match=r"a message 0 with a part that the template cannot show: {'type': 'image'}"):
        ours(PLAIN, [{"role": "user", "content": [{"type": "image"}]}])


def test_conversations_of_sharegpt_have_our_roles() -> None:
    call = json.dumps({"name": "weather", "arguments": {"at": "sea"}})
    said = {
        "system": "s",
        "human": "a",
        "function_call": call,
        "observation": "o",
        "gpt": "b",
        "user": "c",
        "model": "d",
    }
    chat = [{"from": speaker, "value": value} for speaker, value in said.items()]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"at": "sea"}}}]
    wanted = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "o"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert ours(TOOLS, chat) == ours(TOOLS, wanted)


def test_of_several_templates_that_for_tools_shows_them(folder: Path, tmp_path: Path) -> None:
    entries = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>", "chat_template": entries}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    template = open_template("tokenizer", open_tokenizer(str(tmp_path), None, 512))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.show(chat).text == theirs(folder, PLAIN, chat)
    assert template.show(chat, WEATHER).text == theirs(folder, TOOLS, chat, WEATHER)


def test_templates_in_files_of_their_own_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|endoftext|>"
    )
    inner.chat_template = {"default": PLAIN, "tool_use": TOOLS}
    inner.save_pretrained(saved)
    assert (saved / "additional_chat_templates" / "tool_use.jinja").exists()
    again = transformers.AutoTokenizer.from_pretrained(saved)
    template = open_template("tokenizer", open_tokenizer(str(saved), None, 512))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for tools in (None, WEATHER):
        wanted = again.apply_chat_template(chat, tools=tools, tokenize=False)
        assert template.show(chat, tools).text == wanted


def test_an_answer_of_no_weight_is_shown_and_not_learnt() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 1},
    ]
    text, learnt = ours(CHATML, chat)
    assert "assistant\nb<|im_end|>" in text
    assert learnt == ["d<|im_end|>\n"]


@pytest.mark.parametrize(("user", "answers"), [("human", "gpt"), ("User", "Assistant"), ("user", "model")])
def test_well_known_names_of_who_speaks_are_those_of_templates(user: str, answers: str) -> None:
    chat = [{"role": user, "content": "a"}, {"role": answers, "content": "b"}]
    wanted = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ours(CHATML, chat) == ours(CHATML, wanted)
    assert ours(CHATML, chat)[1] == ["b<|im_end|>\n"]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "json in parquet"])
def test_tools_and_calls_reach_the_template_from_any_format(folder: Path, tmp_path: Path, form: str) -> None:
    """In a table every message has the fields of all others."""
    chat = [{**message, "name": None} if index else message for index, message in enumerate(CALLING)]
    chat[1] = {**chat[1], "tool_calls": [{"function": {"name": "weather", "arguments": {"at": "sea"}}}]}
    if form == "jsonl":
        rows = [json.dumps({"talk": chat, "tools": WEATHER})] * 8
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
    elif form == "arrow":
        table = pa.table({"talk": [chat] * 8, "tools": [WEATHER] * 8, "other": list(range(8))})
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif form == "parquet":
        pq.write_table(pa.table({"tools": [WEATHER] * 8, "talk": [chat] * 8}), tmp_path / "a.parquet")
    else:
        values = {"talk": [json.dumps(chat)] * 8, "tools": [json.dumps(WEATHER)] * 8}
        pq.write_table(pa.table(values), tmp_path / "a.parquet")
    kind: Any = form.rpartition(" ")[2]
    data = DataSpec(uri=tmp_path.as_uri(), format=kind, field="talk", template="chatml", tokenizer=str(folder))
    rows = training_samples(job(data, batch=1, seq_len=2000)).read([0])[0]
    tokenizer = open_tokenizer(str(folder), None, 512)
    read = tokenizer.decode([value if value >= 0 else ~value for value in rows.tolist()])
    wanted = ours(CHATML, chat, WEATHER)[0]
    assert read.startswith(wanted + "<|endoftext|>")
    assert '"arguments": {"at": "sea"}' in wanted


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "{[}"}, r"'{\[}' is no list of messages, nor JSON of one"),
        ({"messages": [{"from": "martian", "value": "x"}]}, "has a message 0 from 'martian', which is none of system,"),
        ({"messages": [{"from": "gpt"}]}, "has a message 0 whose content is no text: None"),
        ({"messages": [{"from": "function_call", "value": "f()"}]}, "whose function_call is no JSON: 'f"),
        ({"messages": [{"from": "function_call", "value": "{}"}]}, "whose function_call has no name: '{}'"),
        ({"messages": [{"role": "user", "content": 5}]}, "has a message 0 whose content is no text: 5"),
        ({"messages": [{"role": "user", "content": [5]}]}, "has a message 0 with a part that is neither .*: 5"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "whose weight is neither 0 nor 1: 0.5"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "Alice", "content": "y"}]},
            "has no answer to learn: its messages are of 'Alice', and none of 'assistant'",
        ),
        ({"messages": [{"role": 1, "content": "x"}]}, "has a message 0 whose role is no text: 1"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "has a message 0 whose content is no text: None"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "f"}, "has tools that are no JSON: 'f'"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 5}, "has tools that are no list: 5"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": ["f"]}, "has a tool 0 that is no mapping: 'f'"),
    ],
)
def test_what_cannot_be_shown_is_named(folder: Path, tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(one) for one in (good, row, good)))
    data = DataSpec(uri=tmp_path.as_uri(), format="jsonl", template="chatml", tokenizer=str(folder))
    with pytest.raises(DataError, match=rf"a\.jsonl line 2: .*{problem}"):
        training_samples(job(data, batch=1)).read(range(20))
