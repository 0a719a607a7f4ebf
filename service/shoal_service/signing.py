"""How deliveries of webhooks are signed: as Standard Webhooks says, with HMAC-SHA256 over id, time and body. Pure.

No secret is kept: it is made anew of the administrator's token, which all replicas share, and a nonce of the webhook.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

_PREFIX = "whsec_"


def secret_of(key: str, webhook_id: str, nonce: str) -> str:
    """The secret in the form in which its receiver is given it: `whsec_` and 32 bytes in base64."""
    made = hmac.digest(key.encode(), f"shoal webhook {webhook_id} {nonce}".encode(), "sha256")
    return _PREFIX + base64.b64encode(made).decode()


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def headers(secrets: Sequence[str], delivery_id: str, at_s: int, body: str) -> dict[str, str]:
    """What a receiver checks: `webhook-signature` has for each secret, by spaces, `v1,` and the HMAC in base64 of
    `ID.TIME.BODY`, by the bytes of the secret; one of them that fits is enough. `at_s` are whole seconds of wall time.
    """
    signed = f"{delivery_id}.{at_s}.{body}".encode()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(_signature(secret, signed) for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
