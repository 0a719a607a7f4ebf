"""Opens the OpenID provider that the operator names. Its libraries are needed only where there is one."""

from __future__ import annotations

from shoal_service.openid import Provider
from shoal_service.settings import Settings


def open_provider(settings: Settings) -> Provider | None:
    """Does not ask it anything yet. Raises ValueError for settings that cannot be used."""
    if settings.oidc_issuer is None:
        return None
    if not settings.oidc_issuer.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
        raise ValueError(f"SHOAL_OIDC_ISSUER = {settings.oidc_issuer!r}: must begin with https://")
    if settings.oidc_client_id is None:
        raise ValueError("SHOAL_OIDC_CLIENT_ID is missing: it goes with SHOAL_OIDC_ISSUER")
    try:
        from shoal_service.oidc import OpenId
    except ModuleNotFoundError as error:
        raise ValueError(f"SHOAL_OIDC_ISSUER needs {error.name}: install shoal[oidc] from its wheel") from error
    secret = settings.oidc_client_secret
    return OpenId(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id,
        client_secret=None if secret is None else secret.get_secret_value(),
        scopes=settings.oidc_scopes,
        audience=settings.oidc_audience,
    )
