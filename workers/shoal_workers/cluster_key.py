"""The key of a Ray cluster: made by whichever process asks for it first, and kept where only the cluster's processes
read, in the table of Ray's head."""

from __future__ import annotations

import secrets

from ray.experimental import internal_kv

from shoal_workers.greeting import use_key

_NAMESPACE = b"shoal"
_NAME = b"cluster-key"
_KEY_BYTES = 32


def join_cluster() -> None:
    """From here on this process is known to the others of its cluster, and knows them."""
    internal_kv._internal_kv_put(_NAME, secrets.token_bytes(_KEY_BYTES), False, namespace=_NAMESPACE)
    use_key(internal_kv._internal_kv_get(_NAME, namespace=_NAMESPACE))
