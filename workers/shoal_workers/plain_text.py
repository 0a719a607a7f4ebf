"""Whether what is to be read as text is any: UTF-8 without NUL bytes.

Owns what is said of bytes that are none. Names that say so are `DataSpec`'s affair and `data_files`'.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_planner.data_spec import problem_of_name
from shoal_planner.errors import InvalidField
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File, looked_at

_HEAD_BYTES = 2**12
_SHOWN_BYTES = 16
_CONTINUES = range(0x80, 0xC0)  # of UTF-8: bytes within a character
_LONGEST = 4  # bytes of a character
_LEADS = (0xC0, 0xE0, 0xF0)  # from which on a first byte means two of them, three, four
# With what files begin that are no text, by what they are.
_BEGINNINGS = {
    b"\x1f\x8b": "gzip: decompress it",
    b"\x28\xb5\x2f\xfd": "zstd: decompress it",
    b"BZh": "bzip2: decompress it",
    b"\xfd7zXZ\x00": "xz: decompress it",
    b"\x04\x22\x4d\x18": "lz4: decompress it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "Parquet: say format: parquet",
    b"ARROW1": "an Arrow file: say format: arrow",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}


def check_names(field: str, uri: str, files: Sequence[File]) -> None:
    """Raises InvalidField where one says that it holds no text."""
    for file in files:
        problem = problem_of_name(file.relative, "text")
        if problem is not None:
            raise InvalidField(field, uri, f"cannot be read as text: {file.name} {problem}")


def check_beginnings(field: str, uri: str, files: Sequence[File]) -> None:
    """Of the first ones; what is read is looked at then. Raises InvalidField, OSError, StoreError, DataError."""
    for file in looked_at(files):
        found = file.read(0, min(_HEAD_BYTES, file.num_bytes))
        kind = next((kind for start, kind in _BEGINNINGS.items() if found.startswith(start)), None)
        if kind is not None:
            raise InvalidField(field, uri, f"is no text: {file.name} is {kind}")
        try:
            check_text(file, 0, found)
        except DataError as error:
            raise InvalidField(field, uri, f"cannot be read as text: {error}") from error


def check_text(file: File, offset: int, content: bytes) -> None:
    """Of any range: characters that it cuts are passed over. Raises DataError."""
    first, last = 0, len(content)
    if offset:
        while first < min(_LONGEST - 1, last) and content[first] in _CONTINUES:
            first += 1
    if offset + last < file.num_bytes:
        last -= _num_unfinished(content[first:last])
    text_of(file, offset + first, content[first:last])


def text_of(file: File, offset: int, content: bytes) -> str:
    """`content`, which stands at `offset`, as text. Raises DataError."""
    at = content.find(b"\0")
    try:
        text = content[: at if at >= 0 else len(content)].decode()
    except UnicodeDecodeError as error:
        raise _wrong(file, offset, content, error.start, f"is no UTF-8 ({error.reason})") from error
    if at >= 0:
        raise _wrong(file, offset, content, at, "is no text: it begins with a NUL byte")
    return text


def _num_unfinished(content: bytes) -> int:
    """Bytes at the end that begin a character and do not end it."""
    for count in range(1, min(_LONGEST, len(content) + 1)):
        byte = content[-count]
        if byte not in _CONTINUES:
            return count if byte >= _LEADS[0] and count < sum(byte >= lead for lead in _LEADS) + 1 else 0
    return 0


def _wrong(file: File, offset: int, content: bytes, at: int, problem: str) -> DataError:
    return DataError(file.name, f"byte {offset + at}", repr(content[at : at + _SHOWN_BYTES]), problem)
