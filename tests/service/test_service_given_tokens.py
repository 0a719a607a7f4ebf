"""Tokens that an operator gives in files: of a cluster's connector and of Prometheus, and of nobody else."""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, control_plane, ok

from shoal_service.access import Kind
from shoal_service.auth import admin_token
from shoal_service.given_tokens import given_principals
from shoal_service.identity import sha256


def secret() -> str:
    return secrets.token_urlsafe(32)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_who_has_a_given_token_may_do_what_it_is_for_and_nothing_else(tmp_path: Path) -> None:
    given = tmp_path / "tokens"
    given.mkdir()
    ours, theirs, scraper = secret(), secret(), secret()
    for name, token in {"connector-ray": ours, "connector-other": theirs, "metrics": f"{scraper}\n"}.items():
        (given / name).write_text(token)
    with control_plane(tmp_path / "data", tokens_dir=str(given)) as plane:
        with httpx.Client(base_url=plane.url, headers=bearer(ours), timeout=30) as api:
            me = ok(api.get("/v1/me"))
            assert (me["kind"], me["id"]) == ("connector", "given:connector-ray")
            assert ok(Connector(http=api, cluster_id="ray").renew())["cluster_id"] == "ray"
            assert Connector(http=api, cluster_id="other").renew().status_code == 403
            assert api.get("/v1/jobs").status_code == 403
            assert api.get("/metrics").status_code == 403
            assert api.post("/v1/tokens", json={"name": "more", "role": "server_admin"}).status_code == 403
            assert api.post("/v1/login-links").status_code == 403
        with httpx.Client(base_url=plane.url, headers=bearer(scraper), timeout=30) as api:
            assert "shoal_database_up 1.0" in api.get("/metrics").text
            assert api.get("/v1/jobs").status_code == 403
            assert Connector(http=api, cluster_id="ray").renew().status_code == 403
        assert httpx.get(f"{plane.url}/v1/me", headers=bearer(secret())).status_code == 401


def test_a_folder_as_kubernetes_mounts_it_is_read(tmp_path: Path) -> None:
    """Names are links into a hidden folder, which is replaced when the Secret is."""
    real, token = tmp_path / "..2026_11_23", secret()
    real.mkdir()
    (real / "metrics").write_text(token)
    (tmp_path / "..data").symlink_to(real.name)
    (tmp_path / "metrics").symlink_to("..data/metrics")
    ((hashed, principal),) = given_principals(tmp_path).items()
    assert hashed == sha256(token) and principal.kind is Kind.METRICS and not principal.server_admin
    assert given_principals(None) == {}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"admin": "x" * 10}, "admin: must be called 'metrics', or 'connector-' and the id of a cluster"),
        ({"connector-": "x"}, "connector-: must be called"),
        ({"metrics": "changeme"}, "metrics: holds a token that can be guessed"),
        ({"metrics": "a" * 64}, "can be guessed"),
        ({"connector-a": "0123456789" * 4, "metrics": "0123456789" * 4}, "metrics: holds the same token as another"),
        ({"metrics": "\u00fc" * 40}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named_and_not_repeated(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, token in files.items():
        (tmp_path / name).write_text(token)
    with pytest.raises(ValueError, match=said) as refused:
        given_principals(tmp_path)
    assert not any(token in str(refused.value) for token in files.values() if len(token) > 8)
    with pytest.raises(ValueError, match=r"tokens_dir = .*cannot be read"):
        given_principals(tmp_path / "nowhere")


def test_an_administrators_token_may_be_given_in_a_file_that_nobody_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Secret is mounted: neither made, nor written, nor given another mode."""
    token = secret()
    (tmp_path / "admin.token").write_text(token)

    def refuse(*_arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", refuse)
    assert admin_token(tmp_path) == token
