"""What compose.yaml needs once the control plane and the object store answer: a bucket, and a token each for the
connector and for Prometheus, which may do nothing else. Run again it changes nothing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import boto3

from shoal import Client

BUCKET = "shoal"
CLUSTER_ID = "compose"


def make_bucket() -> None:
    store = boto3.session.Session().client("s3")
    with contextlib.suppress(store.exceptions.BucketAlreadyOwnedByYou, store.exceptions.BucketAlreadyExists):
        store.create_bucket(Bucket=BUCKET)
    store.close()


def make_token(client: Client, path: Path, name: str, role: str, cluster_id: str | None, mode: int) -> None:
    """In a volume of its own for each reader. Whole or not at all: a reader takes what is there."""
    if path.exists():
        return
    made = client.people.create_token(name, role=role, cluster_id=cluster_id, lasting=True)
    partial = path.with_suffix(".part")
    partial.write_text(str(made["secret"]))
    partial.chmod(mode)
    partial.rename(path)


def main(folder: Path) -> None:
    make_bucket()
    with Client() as client:
        make_token(client, folder / "connector/token", f"connector of {CLUSTER_ID}", "connector", CLUSTER_ID, 0o600)
        make_token(client, folder / "metrics/token", "prometheus", "metrics", None, 0o644)  # its image has its own user


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/run/shoal"))
