"""Client.webhooks: addresses that are told of what happens to jobs, as Python calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.client_pages import Call, pages
from shoal.client_text import given, matching, path_part

_PAGE = 50


class Webhooks:
    """What is answered are the JSON objects of the REST interface. Methods raise ShoalError."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def all(self) -> list[dict[str, Any]]:
        """Those that you administer, without their secrets."""
        return [*pages(self._call, "/v1/webhooks", _PAGE)]

    def create(
        self,
        url: str,
        *,
        form: str | None = None,
        events: Sequence[str] = (),
        project: str | None = None,
        all_projects: bool = False,
    ) -> dict[str, Any]:
        """The answer has the `secret`, this once. `form`: json (if none is given), slack, or email (`url` is then
        mailto:ADDRESS). No `events`: all of them. Of `project` (the one that you have), or of `all_projects`."""
        body = given(url=url, form=form, events=[*events] or None, project=project)
        return self._call("POST", "/v1/webhooks", json=body | ({"project": None} if all_projects else {}))

    def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        form: str | None = None,
        events: Sequence[str] = (),
        enabled: bool | None = None,
        if_match: str | None = None,
    ) -> dict[str, Any]:
        """What is given. Refused where it has not the `etag` `if_match` (RequestRefused, 412)."""
        body = given(url=url, form=form, events=[*events] or None, enabled=enabled)
        return self._call("PATCH", f"/v1/webhooks/{path_part(webhook_id)}", json=body, headers=matching(if_match))

    def delete(self, webhook_id: str, *, if_match: str | None = None) -> None:
        self._call("DELETE", f"/v1/webhooks/{path_part(webhook_id)}", headers=matching(if_match))

    def renew_secret(self, webhook_id: str, *, overlap_s: float | None = None) -> dict[str, Any]:
        """The answer has the new `secret`, this once. For `overlap_s` (by default a day) deliveries are signed with the
        one before, too."""
        body = given(overlap_s=overlap_s)
        return self._call("POST", f"/v1/webhooks/{path_part(webhook_id)}/secret", json=body)

    def ping(self, webhook_id: str) -> dict[str, Any]:
        """The delivery that is now to be made."""
        return self._call("POST", f"/v1/webhooks/{path_part(webhook_id)}/ping")

    def deliveries(self, webhook_id: str, *, state: str | None = None) -> Iterator[dict[str, Any]]:
        """Newest first; pages are fetched as they are needed."""
        return pages(self._call, f"/v1/webhooks/{path_part(webhook_id)}/deliveries", _PAGE, state=state)

    def retry(self, webhook_id: str, delivery_id: str) -> dict[str, Any]:
        """Makes a delivery again."""
        return self._call("POST", f"/v1/webhooks/{path_part(webhook_id)}/deliveries/{path_part(delivery_id)}/retry")
