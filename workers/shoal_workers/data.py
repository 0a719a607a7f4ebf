"""Opens what a job is trained and evaluated on, as its DataSpec names it.

Owns which reader is for what, and how much is held out. Bytes of text, and ids as they stand in files, are read from
anywhere (`numbered`); documents are tokenised and packed as they come (`streams`); several sources are one (`mixture`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_planner.data_spec import BYTES, NUM_BYTE_TOKENS, DataSpec, SourceSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_workers.block_counts import VERSION, Counts
from shoal_workers.chat import open_template
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import chosen, describes, find, find_text
from shoal_workers.data_identity import difference, identity
from shoal_workers.data_splits import mixed_splits
from shoal_workers.documents import Blocks, Encoder
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.lines import JsonLines, TextBlocks
from shoal_workers.mixture import Mixture, Round
from shoal_workers.numbered import Apart, NumberedSamples, TokenFile
from shoal_workers.permutation import mixed
from shoal_workers.plain_text import check_beginnings
from shoal_workers.samples import Row, Samples
from shoal_workers.streams import BlockOrder, Streams
from shoal_workers.tables import arrow_blocks, parquet_blocks
from shoal_workers.token_files import byte_files, id_files, indexed_files
from shoal_workers.tokenizing import Tokenizer, hash_of, open_tokenizer

_LINES = (".jsonl", ".ndjson", ".json")
_TOOLS = "tools"  # beside messages: what a model may call
_BLOCK_BYTES = 2**20
_MOST_BLOCK_BYTES = 8 * 2**20
_LEAST_SEQUENCES = 32  # of a block, as a part of one is lost at its end; of about four bytes a token
_LEAST_BLOCKS = 16
_BYTES_PER_TOKEN = 6  # more than most tokenizers make one of


def open_samples(data: DataSpec, seq_len: int, seed: int, vocab: int = NUM_BYTE_TOKENS) -> NumberedSamples:
    """Of one source whose sequences have numbers: bytes of text, or ids. Raises InvalidField("data.uri") if there is
    none to read, or too little."""
    (source,) = data.sources
    return NumberedSamples(_token_files("data.uri", source, seq_len, vocab, 1, None), seq_len, seed, vocab=vocab)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a job trains on and evaluates with (None: nothing), rows of `data_identity` of all that it reads, and the
    `problem` with which no job is to begin."""

    training: Samples
    evaluation: Samples | None
    files: list[Row]
    problem: InvalidField | None

    def differs(self, began: Sequence[Row]) -> DataError | InvalidField | None:
        """From what a job has begun with. One that did so before a problem was looked for goes on as it was."""
        return difference(began, self.files) if began else self.problem


def training_samples(job: JobSpec, cache: DataCache | None = None) -> Samples:
    """`cache` is for what comes from far. Raises InvalidField, which names the field; StoreError, DataError."""
    opening = _Opening(job, cache, job.held_out_sequences, evaluation=False)
    found = _opened(job, job.data.sources, _fields(job), opening)
    if opening.problem is not None:
        raise opening.problem
    return found


def evaluation_samples(job: JobSpec, cache: DataCache | None = None) -> Samples | None:
    """None where the job evaluates nothing. Raises what `training_samples` does."""
    opening = _Opening(job, cache, job.eval_sequences, evaluation=True)
    found = _evaluation(job, opening)
    if opening.problem is not None:
        raise opening.problem
    return found


@functools.lru_cache(maxsize=1)
def samples_of(job: JobSpec, cache: DataCache | None = None) -> Opened:
    """Of the one job of this process: there may be thousands of files, and they are the same in every epoch."""
    for_training = _Opening(job, cache, job.held_out_sequences, evaluation=False)
    for_evaluation = _Opening(job, cache, job.eval_sequences, evaluation=True)
    training = _opened(job, job.data.sources, _fields(job), for_training)
    evaluation = _evaluation(job, for_evaluation)
    own = for_evaluation.files if job.data.eval_source is not None else []
    problem = for_training.problem or for_evaluation.problem
    return Opened(training=training, evaluation=evaluation, files=[*for_training.files, *own], problem=problem)


def _evaluation(job: JobSpec, opening: _Opening) -> Samples | None:
    if not job.eval_sequences:
        return None
    source = job.data.eval_source
    if source is None:
        return _opened(job, job.data.sources, _fields(job), opening)
    return _opened(job, (source,), ("data.eval_uri",), opening)


def _fields(job: JobSpec) -> tuple[str, ...]:
    return tuple(f"data.mix[{index}].uri" for index in range(len(job.data.mix))) or ("data.uri",)


def _opened(job: JobSpec, sources: Sequence[SourceSpec], fields: Sequence[str], opening: _Opening) -> Samples:
    if len(sources) == 1:
        return opening.source(fields[0], sources[0], job.train.seed)
    # Sources that are alike, and even the same one twice, are not read in the same order.
    seeds = [mixed(job.train.seed, index) for index in range(len(sources))]
    parts = [opening.source(*one) for one in zip(fields, sources, seeds, strict=True)]
    turns = Round([source.weight for source in sources], job.train.global_batch, job.train.seed)
    return Mixture([(part, isinstance(part, Streams)) for part in parts], turns, job.train.global_batch)


class _Opening:
    """What all sources of a job are opened with, the `files` of these, and the first `problem` with them. `held_out`
    sequences of each are not for training; or (`evaluation`) are what is read."""

    def __init__(self, job: JobSpec, cache: DataCache | None, held_out: int, *, evaluation: bool) -> None:
        self.files: list[Row] = []
        self.problem: InvalidField | None = None
        self._job = job
        self._cache = cache
        self._held_out = held_out
        self._evaluation = evaluation
        self._tokenizer: Tokenizer | None = None

    def source(self, field: str, source: SourceSpec, seed: int) -> Samples:
        seq_len, vocab = self._job.train.seq_len, self._job.model.vocab
        if not (source.holds_ids or (source.format == "text" and self._job.data.tokenizer == BYTES)):
            return self._streams(field, source, seed)
        own_text = self._evaluation and field == "data.eval_uri"
        files = _token_files(field, source, seq_len, vocab, self._held_out + (not own_text), self._cache)
        apart = self._apart(source)
        indexes = [one.index.file for one in files if apart is not None and one.index is not None]
        self._note(field, source, [one.file for one in files], indexes)
        out, evaluation = self._held_out, self._evaluation
        return NumberedSamples(files, seq_len, seed, vocab=vocab, held_out=out, evaluation=evaluation, apart=apart)

    def _note(self, field: str, source: SourceSpec, files: Sequence[File], indexes: Sequence[File] = ()) -> None:
        self.files.append(identity(source.uri, [*files, *indexes]))
        is_text = source.format == "text"
        told = [file for file in files if not (is_text and describes(file))]
        self.problem = self.problem or mixed_splits(field, source.uri, told, of_text=is_text)

    def _apart(self, source: SourceSpec) -> Apart | None:
        """Of what is not tokenised here. Files of ids alone have the end token between documents."""
        if not self._job.data.by_document:
            return None
        return Apart(end=self._opened_tokenizer().end if source.format == "tokens" else None)

    def _opened_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            data = self._job.data
            self._tokenizer = open_tokenizer(data.tokenizer, data.end_token, self._job.model.vocab)
        return self._tokenizer

    def _streams(self, field: str, source: SourceSpec, seed: int) -> Streams:
        data, train = self._job.data, self._job.train
        tokenizer = self._opened_tokenizer()
        template = None
        if source.template is not None:  # the rows of a table have the fields of every other, null where they are not
            sparse = source.format != "jsonl"
            template = open_template(source.template, tokenizer, sparse=sparse)
        blocks, block_bytes = self._blocks(field, source)
        self._note(field, source, blocks.files)
        order = BlockOrder(
            num_blocks=len(blocks),
            global_batch=train.global_batch,
            seed=seed,
            held_out=self._held_blocks(field, source.uri, len(blocks), block_bytes),
            evaluation=self._evaluation,
        )
        how = f"{tokenizer.digest} {None if template is None else template.digest} {train.seq_len}"
        known = f"{VERSION} {source} {how} {block_bytes} {blocks.digest}{' by document' if data.by_document else ''}"
        counts = Counts(None if self._cache is None else self._cache.notes(f"counts {hash_of(known)}"))
        cache = None if tokenizer.digest == BYTES else self._cache
        encoder = Encoder(tokenizer, template, cache, by_document=data.by_document)
        return Streams(blocks, encoder, order, train.seq_len, counts, source.uri)

    def _blocks(self, field: str, source: SourceSpec) -> tuple[Blocks, int]:
        looked_for = find_text if source.format == "text" else find
        files = looked_for(field, source.uri, self._cache)
        if not files:
            raise InvalidField(field, source.uri, "has no file that is not empty")
        total = sum(file.num_bytes for file in files)
        block_bytes = _block_bytes(total, self._job.train.global_batch, self._job.train.seq_len)
        sizes = block_bytes, max(block_bytes, min(_MOST_BLOCK_BYTES, total // (2 * self._job.train.global_batch)))
        column, num_streams = source.text_field, self._job.train.global_batch
        tools = None if source.template is None else _TOOLS
        match source.format:
            case "jsonl":
                files = chosen(field, source.uri, files, *_LINES)
                check_beginnings(field, source.uri, files)
                lines = JsonLines(files, block_bytes, column, tools)
                lines.check_first()
                return lines, block_bytes
            case "parquet" | "arrow":
                opened = parquet_blocks if source.format == "parquet" else arrow_blocks
                blocks = opened(field, source.uri, files, column, sizes, self._cache, num_streams, tools)
                return blocks, block_bytes
            case _:
                return TextBlocks(files, block_bytes), block_bytes

    def _held_blocks(self, field: str, uri: str, num_blocks: int, block_bytes: int) -> int:
        if not num_blocks:
            raise InvalidField(field, uri, "has no documents")
        if not self._held_out:
            return 0
        if field == "data.eval_uri":
            return num_blocks
        if num_blocks < 2:
            raise InvalidField(field, uri, "has too little text to leave some of it out for evaluations")
        wanted = self._held_out * (self._job.train.seq_len + 1) * _BYTES_PER_TOKEN
        return max(1, min(-(-wanted // block_bytes), num_blocks // 2))


def _block_bytes(total: int, global_batch: int, seq_len: int) -> int:
    """Two for each slot of the batch at least, if that leaves them room for enough sequences."""
    least = min(_LEAST_SEQUENCES * 4 * (seq_len + 1), max(total // _LEAST_BLOCKS, 4 * (seq_len + 1)))
    return max(least, min(_BLOCK_BYTES, total // (2 * global_batch)))


def _token_files(
    field: str, source: SourceSpec, seq_len: int, vocab: int, num_sequences: int, cache: DataCache | None
) -> list[TokenFile]:
    match source.format:
        case "tokens":
            files = id_files(field, source.uri, source.token_type, vocab, cache)
        case "megatron":
            files = indexed_files(field, source.uri, cache)
        case _:
            files = byte_files(field, source.uri, cache)
    if sum(file.num_tokens for file in files) < num_sequences * seq_len + 1:
        wanted = "one sequence" if num_sequences == 1 else f"{num_sequences} sequences"
        raise InvalidField(field, source.uri, f"has too little text for {wanted} of {seq_len} tokens and the next")
    return files
