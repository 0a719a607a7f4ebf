"""Whether the control plane may listen where it is told to: beyond this machine only with TLS, or behind something that
speaks it, and with a token that nobody guesses. Pure."""

from __future__ import annotations

from shoal_service.loopback import is_loopback
from shoal_service.settings import Settings

_LEAST_TOKEN = 32  # characters; the tokens that we make have 49
_LEAST_DIFFERENT = 10


def check_exposure(settings: Settings, admin_token: str) -> None:
    """Raises ValueError with a sentence for the operator."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ValueError(
            "SHOAL_TLS_CERT and SHOAL_TLS_KEY (--tls-cert and --tls-key) go together: one of them is missing"
        )
    if is_loopback(settings.host):
        return
    if settings.tls_cert is None and not settings.behind_proxy:
        raise ValueError(
            f"refuses to listen on {settings.host} without TLS: tokens would cross the network for everybody to read. "
            "Give --tls-cert and --tls-key; or --behind-proxy, where something in front of this server speaks TLS and "
            "nobody can pass it by; or --host 127.0.0.1, to listen on this machine alone"
        )
    if is_guessable(admin_token):
        raise ValueError(
            f"refuses to listen on {settings.host} with an administrator's token that can be guessed: delete "
            f"{settings.data_path / 'admin.token'} and start again for a new one"
        )


def is_guessable(token: str) -> bool:
    return len(token) < _LEAST_TOKEN or len(set(token)) < _LEAST_DIFFERENT
