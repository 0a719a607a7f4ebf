"""Client.storages: how the object stores of a project are reached, as Python calls."""

from __future__ import annotations

import builtins
from typing import Any

from shoal.client_pages import Call, pages
from shoal.client_text import given, matching, path_part

_PAGE = 200


class Storages:
    """Of one project. What is answered are the JSON objects of the REST interface. Methods raise ShoalError."""

    def __init__(self, call: Call, project: str) -> None:
        self._call = call
        self._path = f"/v1/projects/{path_part(project)}/storages"

    def list(self) -> builtins.list[dict[str, Any]]:
        return [*pages(self._call, self._path, _PAGE)]

    def get(self, name: str) -> dict[str, Any]:
        return self._call("GET", f"{self._path}/{path_part(name)}")

    def set(
        self,
        name: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        environment: str | None = None,
        profile: str | None = None,
        if_match: str | None = None,
    ) -> dict[str, Any]:
        """Makes it, or replaces it. Credentials are found by whoever opens the store: with `environment` X in the
        variables SHOAL_STORAGE_X_ACCESS_KEY_ID and _SECRET_ACCESS_KEY, with `profile` x in the section shoal-x of the
        AWS credentials file, and with neither as boto3 finds them. Refused where it has not the `etag` `if_match`
        (RequestRefused, 412)."""
        credentials = given(environment=environment, profile=profile)
        body = given(endpoint=endpoint, region=region, credentials=credentials or None)
        return self._call("PUT", f"{self._path}/{path_part(name)}", json=body, headers=matching(if_match))

    def delete(self, name: str, *, if_match: str | None = None) -> None:
        """Raises Conflict while a job that has not ended uses it."""
        self._call("DELETE", f"{self._path}/{path_part(name)}", headers=matching(if_match))
