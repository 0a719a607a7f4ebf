"""What can go wrong in recovery.

    Exception
      StateLost           no step is whole in what survivors hold and the store has
      StoreError          the object store cannot be used as asked
        StoreUnreachable    it cannot be used at present: the same call may succeed later
          StoreRefused        it is there, and does not let us: credentials, permission, no such bucket
          StoreHeldUp         another writer has begun to write an object that must be written once, and does not go on
        StoreConflict       an object that must be written once is already there
        StoreChanged        an object is not the one any more that was listed
        ManifestUnreadable  a manifest is not one, or is another one's
        StoredPieceCorrupt  bytes do not have the checksum that the manifest promises
        BaseChanged         the weights that adapters are trained beside are not what they were

All cross process borders: positional arguments only, and the message in `__str__`.
"""

from __future__ import annotations


class StateLost(Exception):
    """`missing` are examples of intervals that nobody has, as text."""

    def __init__(self, reason: str, missing: tuple[str, ...]) -> None:
        super().__init__(reason, missing)
        self.reason = reason
        self.missing = missing

    def __str__(self) -> str:
        return f"{self.reason}: {', '.join(self.missing)}" if self.missing else self.reason


class StoreError(Exception):
    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(uri, problem)
        self.uri = uri
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.uri}: {self.problem}"


class StoreUnreachable(StoreError):
    pass


class StoreRefused(StoreUnreachable):
    pass


class StoreHeldUp(StoreUnreachable):
    pass


class StoreConflict(StoreError):
    pass


class StoreChanged(StoreError):
    pass


class ManifestUnreadable(StoreError):
    pass


class StoredPieceCorrupt(StoreError):
    pass


class BaseChanged(StoreError):
    """`expected` and `found` are fingerprints."""

    def __init__(self, uri: str, expected: str, found: str) -> None:
        problem = f"has changed since the job began: its fingerprint is {found}, and train.lora.base is {expected}"
        super().__init__(uri, problem)
        self.args = (uri, expected, found)
        self.expected = expected
        self.found = found
