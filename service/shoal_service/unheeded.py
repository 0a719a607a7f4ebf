"""What the folder that a job's weights come from says, and the job does not go by: told before anything is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.script_spec import AnyJob
from shoal_recovery.errors import StoreError
from shoal_recovery.hf_beside import TOKENIZER, Files, beside, said_beside
from shoal_recovery.hf_layout import dropouts_of
from shoal_service.errors import invalid_field
from shoal_service.shapes_jobs import Foretold

_FROM = "train.init_from"


async def unheeded(job: AnyJob, store_check_s: float) -> list[Foretold]:
    """Of a job whose surroundings were checked. Codes: `dropout_left_out`, `tokenizer_left_out`. Raises BadInput where
    the folder cannot be read any more."""
    uri = job.train.init_from if isinstance(job, JobSpec) else None
    if uri is None:
        return []
    assert isinstance(job, JobSpec)
    try:
        async with asyncio.timeout(store_check_s):
            files = await asyncio.to_thread(beside, uri)
        return list(_found(job, uri, files))
    except StoreError as error:
        raise invalid_field(InvalidField(_FROM, uri, f"cannot be read: {error.problem}")) from error
    except InvalidField as error:
        raise invalid_field(InvalidField(_FROM, uri, f"cannot be used: {error}")) from error
    except TimeoutError as error:
        raise invalid_field(InvalidField(_FROM, uri, f"did not answer within {store_check_s:g} s")) from error


def _found(job: JobSpec, uri: str, files: Files) -> Iterator[Foretold]:
    if dropouts := [f"{name} = {share}" for name, share in dropouts_of(said_beside(files)).items() if share]:
        reason = f"{uri} says {', '.join(dropouts)}: Shoal trains without dropout"
        yield {"code": "dropout_left_out", "param": _FROM, "reason": reason}
    if job.data.reads_bytes and TOKENIZER in files:
        reason = f"{uri} has a tokenizer, and text is read as bytes, which its model does not know"
        yield {"code": "tokenizer_left_out", "param": "data.tokenizer", "reason": reason}
