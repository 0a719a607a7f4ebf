"""DataSpec: what a job is trained on, as its user names it.

Owns what the fields may be by themselves. Whether files exist, and what stands in them, only who reads them can tell.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import unquote

from shoal_planner.errors import InvalidField
from shoal_planner.uris import parts_of

Format = Literal["text", "jsonl", "parquet", "arrow", "tokens", "megatron"]
TokenType = Literal["uint16", "uint32"]
Attention = Literal["sequence", "document"]

NUM_BYTE_TOKENS = 256
BYTES = "bytes"
STDLIB = "stdlib:"
# They hold ids already: nothing is left for a tokenizer to do.
OF_IDS = ("tokens", "megatron")
_WITH_FIELDS = ("jsonl", "parquet", "arrow")
# What would be read as text without complaint, and never is any.
_NO_TEXT = {".parquet": "parquet", ".arrow": "arrow", ".idx": "megatron", ".bin": "tokens, or megatron"}
_BINARY = (".npy", ".npz", ".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".h5", ".pdf", ".docx", ".xlsx", ".sqlite")
# Whatever is in them: files are read by ranges, which these do not have.
_COMPRESSED = (".gz", ".tgz", ".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar")
STORAGE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
LEAST_SHARE = 0.0002  # of a source in a mixture, whose order is a round of some ten thousand samples
_S3 = re.compile(r"s3://[^/]+/.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Files of one format: at `file:///path` (one, or a folder of them; the path alone is taken, too),
    `s3://bucket/prefix`, or, for text, `stdlib:`, the source of the running Python's standard library.

    `field` is where the text of a line or row stands (`text` unless it is said, `messages` with a `template`, which
    makes text of a list of messages). `token_type` is that of `tokens`. `weight` counts in a mixture alone. `storage`
    is the project's profile that says how the bucket is reached, where that is not as everywhere.
    """

    uri: str
    storage: str | None = None
    format: Format = "text"
    field: str | None = None
    template: Literal["chatml", "tokenizer"] | None = None
    token_type: TokenType = "uint16"
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", _as_uri(self.uri))
        _check_uri("uri", self.uri, self.format)
        check_storage(self.storage, self.uri)
        if self.field is not None and self.format not in _WITH_FIELDS:
            raise InvalidField("field", self.field, f"is of no use with format {self.format!r}")
        if self.template is not None and self.format not in _WITH_FIELDS:
            raise InvalidField("template", self.template, f"is of no use with format {self.format!r}")
        if self.token_type != "uint16" and self.format != "tokens":
            raise InvalidField("token_type", self.token_type, "is of no use but with format 'tokens'")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidField("weight", self.weight, "must be more than zero")

    @property
    def text_field(self) -> str:
        return self.field or ("text" if self.template is None else "messages")

    @property
    def holds_ids(self) -> bool:
        return self.format in OF_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What is trained on: the files at `uri`, or a `mix` of several sources by their weights. `tokenizer` is `bytes`
    or the absolute path, on every node, of a tokenizers JSON file or of a Hugging Face folder; `end_token` its token
    between documents, where it names none itself. `storage` is as in a SourceSpec, and that of `eval_uri`, too, where
    this is in S3. Evaluations are on `eval_uri`, which is of the same format as `uri`, or else on what training leaves
    out of every source. `attention`: a token sees all before it in its sequence, or only what is of its own document;
    then positions begin anew with each, too."""

    uri: str | None = None
    storage: str | None = None
    eval_uri: str | None = None
    tokenizer: str = BYTES
    format: Format = "text"
    field: str | None = None
    template: Literal["chatml", "tokenizer"] | None = None
    token_type: TokenType = "uint16"
    end_token: str | None = None
    attention: Attention = "sequence"
    mix: tuple[SourceSpec, ...] = ()

    def __post_init__(self) -> None:
        for name in ("uri", "eval_uri"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_uri(given))
        if self.uri is None and not self.mix:
            raise InvalidField("uri", None, "is required, unless there is a mix")
        if self.storage is not None and self.mix and not _is_far(self.eval_uri):
            raise InvalidField("storage", self.storage, "is of no use beside a mix: each source says its own")
        if self.uri is not None and self.mix:
            raise InvalidField("uri", self.uri, "cannot stand beside a mix: make it one of its sources")
        if self.mix and self.eval_uri is None:
            self._check_unused("of no use beside a mix without eval_uri: each source says its own")
        if self.tokenizer != BYTES:
            object.__setattr__(self, "tokenizer", _as_path("tokenizer", self.tokenizer))
        if self.end_token is not None and self.tokenizer == BYTES:
            raise InvalidField("end_token", self.end_token, "needs a tokenizer: bytes end a document with 0")
        if self.uri is not None:
            self._check_source(_as_source(self, self.uri), "")
        total = sum(source.weight for source in self.mix)
        for index, source in enumerate(self.mix):
            self._check_source(source, f"mix[{index}].")
            if source.weight < total * LEAST_SHARE:
                problem = f"must be at least {LEAST_SHARE} of all weights together ({total:g}): it would not be read"
                raise InvalidField(f"mix[{index}].weight", source.weight, problem)
        if self.eval_uri is not None:
            try:
                self._check_source(_as_source(self, self.eval_uri), "")
            except InvalidField as error:
                raise InvalidField(error.field.replace("uri", "eval_uri"), error.value, error.problem) from error

    def _check_unused(self, problem: str) -> None:
        plain = DataSpec.__dataclass_fields__
        for name in ("format", "field", "template", "token_type"):
            if getattr(self, name) != plain[name].default:
                raise InvalidField(name, getattr(self, name), problem)

    def _check_source(self, source: SourceSpec, path: str) -> None:
        if source.template == "tokenizer" and self.tokenizer == BYTES:
            raise InvalidField(f"{path}template", source.template, "needs a tokenizer that has one, not bytes")
        if self.by_document and source.format == "tokens" and self.tokenizer == BYTES:
            problem = "must be that of the ids: with attention 'document' its end token tells where documents end"
            raise InvalidField("tokenizer", self.tokenizer, problem)

    @property
    def by_document(self) -> bool:
        return self.attention == "document"

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """What is trained on, in order."""
        return self.mix or (_as_source(self, str(self.uri)),)

    @property
    def eval_source(self) -> SourceSpec | None:
        return None if self.eval_uri is None else _as_source(self, self.eval_uri)

    @property
    def reads_bytes(self) -> bool:
        """Whether any of its tokens are bytes."""
        held_out = () if self.eval_source is None else (self.eval_source,)
        return self.tokenizer == BYTES and not all(source.holds_ids for source in (*self.sources, *held_out))


def _as_uri(place: str) -> str:
    return PurePosixPath(place).as_uri() if place.startswith("/") else place


def _as_path(field: str, given: str) -> str:
    """Of a place on a node, which may be said as a URI, too. Raises InvalidField."""
    path = given
    if given.startswith("file://"):
        parts = parts_of(field, given)
        path = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
    if not path.startswith("/"):
        problem = (
            "must be 'bytes', or the absolute path (or file:///path) of a tokenizers JSON file or Hugging Face folder"
        )
        raise InvalidField(field, given, problem)
    return path


def _as_source(data: DataSpec, uri: str) -> SourceSpec:
    storage = data.storage if uri == data.uri or _is_far(uri) else None
    kind = {"format": data.format, "field": data.field, "template": data.template, "token_type": data.token_type}
    return SourceSpec(uri=uri, storage=storage, **kind)  # type: ignore[arg-type]


def _is_far(uri: str | None) -> bool:
    return uri is not None and uri.startswith("s3://")


def check_storage(storage: str | None, uri: str | None) -> None:
    """Raises InvalidField."""
    if storage is None:
        return
    if not STORAGE.fullmatch(storage):
        problem = "must be the name of a storage profile: lower-case letters, digits and dashes"
        raise InvalidField("storage", storage, problem)
    if not _is_far(uri):
        raise InvalidField("storage", storage, "is for places that begin with s3://")


def _check_uri(name: str, uri: str, form: str) -> None:
    scheme = parts_of(name, uri).scheme
    if scheme not in ("stdlib", "file", "s3"):
        raise InvalidField(name, uri, "must be an absolute path, or begin with stdlib:, file:// or s3://")
    if scheme == "stdlib" and uri != STDLIB:
        raise InvalidField(name, uri, "must be exactly 'stdlib:'")
    if scheme == "stdlib" and form != "text":
        raise InvalidField(name, uri, f"is text, not {form}")
    if scheme == "s3" and not _S3.fullmatch(uri):
        raise InvalidField(name, uri, "must name a bucket and what is in it: s3://bucket/prefix")
    if scheme != "stdlib" and (problem := problem_of_name(uri, form)) is not None:
        raise InvalidField(name, uri, problem)


def problem_of_name(name: str, form: str) -> str | None:
    """Why no file of that name can be read in this format, as far as its name tells; None if it does not."""
    lower = name.lower()
    if lower.endswith(_COMPRESSED):
        return "is compressed, or an archive, of which no parts can be read: decompress or unpack it first"
    if form != "text":
        return None
    ending = next((ending for ending in _NO_TEXT if lower.endswith(ending)), None)
    if ending is not None:
        return f"is no text: say format: {_NO_TEXT[ending]}"
    return "is no text: convert it to some" if lower.endswith(_BINARY) else None
