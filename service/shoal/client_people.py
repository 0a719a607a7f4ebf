"""Client.people: projects, members, users, tokens and what was done by whom, as Python calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.client_pages import Call, pages
from shoal.client_text import given, matching, path_part

_PAGE = 200


class People:
    """What is answered are the JSON objects of the REST interface. Methods raise ShoalError. Those with `if_match`, an
    `etag` of what they change, are refused where that is not as it was then (RequestRefused, 412)."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def me(self) -> dict[str, Any]:
        """Who the token is of, and the role in each project."""
        return self._call("GET", "/v1/me")

    def projects(self) -> list[dict[str, Any]]:
        """Those in which you have a role."""
        return [*self._pages("/v1/projects")]

    def project(self, project: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/projects/{path_part(project)}")

    def create_project(self, project: str) -> dict[str, Any]:
        return self._call("POST", "/v1/projects", json={"id": project})

    def delete_project(self, project: str) -> None:
        """Raises Conflict for one that has had jobs."""
        self._call("DELETE", f"/v1/projects/{path_part(project)}")

    def members(self, project: str) -> list[dict[str, Any]]:
        return [*self._pages(f"/v1/projects/{path_part(project)}/members")]

    def add_member(self, project: str, who: str, role: str) -> dict[str, Any]:
        """`who` is a user's id or e-mail address; somebody unknown is invited. Replaces the role that they have."""
        named = {"user_id": who} if who.startswith("user_") else {"email": who}
        return self._call("POST", f"/v1/projects/{path_part(project)}/members", json={**named, "role": role})

    def set_role(self, project: str, user_id: str, role: str, *, if_match: str | None = None) -> dict[str, Any]:
        """Another role for a member."""
        path = f"/v1/projects/{path_part(project)}/members/{path_part(user_id)}"
        return self._call("PUT", path, json={"role": role}, headers=matching(if_match))

    def remove_member(self, project: str, user_id: str, *, if_match: str | None = None) -> None:
        path = f"/v1/projects/{path_part(project)}/members/{path_part(user_id)}"
        self._call("DELETE", path, headers=matching(if_match))

    def users(self) -> Iterator[dict[str, Any]]:
        yield from self._pages("/v1/users")

    def change_user(self, user_id: str, *, server_admin: bool, if_match: str | None = None) -> dict[str, Any]:
        """Makes a user an administrator of the server, or no more."""
        body, headers = {"server_admin": server_admin}, matching(if_match)
        return self._call("PATCH", f"/v1/users/{path_part(user_id)}", json=body, headers=headers)

    def delete_user(self, user_id: str, *, if_match: str | None = None) -> None:
        """Roles, sessions and tokens end with the user."""
        self._call("DELETE", f"/v1/users/{path_part(user_id)}", headers=matching(if_match))

    def tokens(self) -> Iterator[dict[str, Any]]:
        """Newest first, without secrets."""
        yield from self._pages("/v1/tokens")

    def create_token(
        self,
        name: str,
        *,
        role: str,
        project: str | None = None,
        cluster_id: str | None = None,
        expires_in_s: float | None = None,
        lasting: bool = False,
    ) -> dict[str, Any]:
        """The answer has the `secret`, this once. Without `expires_in_s` the server decides; `lasting`: never."""
        body = given(name=name, role=role, project=project, cluster_id=cluster_id, expires_in_s=expires_in_s)
        return self._call("POST", "/v1/tokens", json=body | ({"expires_in_s": None} if lasting else {}))

    def revoke_token(self, token_id: str) -> dict[str, Any]:
        return self._call("DELETE", f"/v1/tokens/{path_part(token_id)}")

    def audit_events(self, *, project: str | None = None, action: str | None = None) -> Iterator[dict[str, Any]]:
        """What was done by whom, and what was refused, newest first."""
        yield from self._pages("/v1/audit-events", project=project, action=action)

    def _pages(self, path: str, **params: Any) -> Iterator[dict[str, Any]]:
        return pages(self._call, path, _PAGE, **params)
