"""Pages over HTTP, signed in as a browser is: who may not do something finds no button for it, forms do what REST does,
and what a job printed is found from what happened to it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from control_plane import Connector, enter, job_mapping, ok, story

from shoal_service.database import Database
from shoal_service.jobs import rfc3339
from shoal_service.log_retention import forget_old

FORMS = ("pause", "cancel", "checkpoint", "limits")


@contextmanager
def browser(api: httpx.Client, **headers: str) -> Iterator[httpx.Client]:
    """Signed in as whoever has the token, by a link."""
    link = ok(api.post("/v1/login-links", headers=headers))["url"]
    options = {"accept": "text/html"}
    with httpx.Client(base_url=api.base_url, headers=options, timeout=60, follow_redirects=True) as client:
        assert enter(client, link).is_success
        yield client


def send(client: httpx.Client, page: str, action: str, **fields: str) -> httpx.Response:
    """A form of that page."""
    csrf = re.findall(r'name="csrf" value="([^"]+)"', client.get(page).text)[0]
    return client.post(action, data={"csrf": csrf, **fields})


@pytest.fixture
def job(api: httpx.Client, connector: Connector, tmp_path: Any) -> str:
    ok(connector.renew(lease_s=600))
    document = job_mapping(checkpoint={"uri": (tmp_path / "store").as_uri()}, limits={"budget_usd": 1000.0})
    job_id: str = ok(api.post("/v1/jobs", json=document))["id"]
    ok(connector.send(job_id, story(document, started_at_s=time.time() - 60).entries[:40]))
    return job_id


def actions(page: str) -> set[str]:
    return set(re.findall(r'action="([^"]+)"', page))


def test_nobody_sees_buttons_that_they_may_not_press(api: httpx.Client, job: str) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))
    with ExitStack() as stack:
        seen = {}
        for role in ("viewer", "member", "admin"):
            made = ok(api.post("/v1/tokens", json={"name": role, "role": role, "project": "default"}))
            client = stack.enter_context(browser(api, authorization=f"Bearer {made['secret']}"))
            seen[role] = {
                path: client.get(path).text
                for path in ("/", "/nodes", f"/jobs/{job}", "/projects", "/projects/default", "/tokens")
            }
        administrator = stack.enter_context(browser(api)).get(f"/jobs/{job}").text
    for name in FORMS:
        assert f"/jobs/{job}/{name}" not in actions(seen["viewer"][f"/jobs/{job}"])
        assert f"/jobs/{job}/{name}" in actions(seen["member"][f"/jobs/{job}"])
    assert "/new" not in seen["viewer"]["/"] and "/new" in seen["member"]["/"]
    assert "Clone" not in seen["viewer"][f"/jobs/{job}"] and "Clone" in seen["member"][f"/jobs/{job}"]
    assert "Budget left" in seen["viewer"][f"/jobs/{job}"]
    assert "/preempt" not in seen["admin"][f"/jobs/{job}"] and "/preempt" in administrator
    assert "/projects/default/members" not in actions(seen["member"]["/projects/default"])
    assert "/projects/default/members" in actions(seen["admin"]["/projects/default"])
    assert "/projects" not in actions(seen["admin"]["/projects"])
    assert "/tokens" not in actions(seen["member"]["/tokens"]), "a token may not give others away"
    assert "/tokens" in actions(seen["admin"]["/tokens"])


def test_forms_of_a_job_do_what_rest_does(api: httpx.Client, connector: Connector, job: str) -> None:
    page = f"/jobs/{job}"
    with browser(api) as client:
        assert client.post(f"{page}/checkpoint", data={"csrf": "guessed"}).status_code == 403
        assert client.post(f"{page}/limits", data={"max_devices": "4"}).status_code == 403
        answer = send(client, page, f"{page}/checkpoint")
        assert str(answer.url).endswith("#part-checkpoints")
        (wish,) = connector.wishes()["jobs"]
        assert wish["saves"] == 1
        answer = send(client, page, f"{page}/limits", budget_usd="", max_devices="4", priority="high")
        assert str(answer.url).endswith("#part-limits")
        spec = ok(api.get(f"/v1/jobs/{job}"))["spec"]
        assert (spec["limits"]["budget_usd"], spec["limits"]["max_devices"], spec["priority"]) == (None, 4, "high")
        refused = send(client, page, f"{page}/limits", max_devices="many")
        assert refused.status_code == 422 and "Max_devices = &#39;many&#39;" in refused.text
        assert "Most devices" in answer.text and 'value="high"' in answer.text


def test_a_new_job_begins_with_what_another_has_stored(api: httpx.Client, job: str) -> None:
    with browser(api) as client:
        found = client.get(f"/new?from={job}&step=39").text
    assert "init_step: 39" in found and f"/store/{job}" in found


def test_a_clone_stays_in_the_project_of_its_source_unless_another_is_chosen(
    api: httpx.Client, connector: Connector
) -> None:
    ok(connector.renew(lease_s=600))
    for project in ("research", "teaching"):
        ok(api.post("/v1/projects", json={"id": project}))
    document = job_mapping()
    stored = job_mapping(checkpoint={"storage": "ours", "uri": "s3://ours/runs"})
    source = ok(api.post("/v1/jobs", params={"project": "research"}, json=document))["id"]
    page = f"/new?from={source}"
    with browser(api) as client:
        shown = client.get(page).text
        assert '<option value="research" selected>' in shown and '<option value="default">' in shown
        assert '<option value="default" selected>' in client.get("/new").text
        previewed = send(client, page, "/new/preview", job=json.dumps(document), project="research")
        assert previewed.is_success and '<option value="research" selected>' in previewed.text
        for project in ("research", "teaching"):  # each has storage profiles of its own, and none of these
            refused = send(client, page, "/new/preview", job=json.dumps(stored), project=project)
            assert refused.status_code == 422 and f"no storage of project {project}" in refused.text
        fields = {"nonce": "one", "job": json.dumps(document), "project": "research"}
        made = str(send(client, page, "/new", **fields).url).rpartition("/")[2]
        assert ok(api.get(f"/v1/jobs/{made}"))["project"] == "research"
        fields = {"nonce": "two", "job": json.dumps(job_mapping()), "project": "teaching"}
        made = str(send(client, page, "/new", **fields).url).rpartition("/")[2]
        assert ok(api.get(f"/v1/jobs/{made}"))["project"] == "teaching"
        assert send(client, page, "/new", **{**fields, "project": "nowhere"}).status_code == 404
    theirs = ok(api.post("/v1/tokens", json={"name": "theirs", "role": "member", "project": "research"}))
    with browser(api, authorization=f"Bearer {theirs['secret']}") as client:
        assert 'type="hidden" name="project" value="research"' in client.get(page).text
        assert send(client, page, "/new", job=json.dumps(job_mapping()), project="teaching").status_code == 404


def bring(connector: Connector, job: str, rows: list[list[Any]]) -> None:
    source = {"node": "big-0", "life": "1", "lines": rows}
    body = {"cluster_id": connector.cluster_id, "holder": connector.holder, "sources": [source]}
    ok(connector.http.post(f"/v1/jobs/{job}/logs", json=body))


def shown(text: str) -> list[str]:
    return re.findall(r'<td class="text">([^<]*)', text)


def test_lines_are_shown_searched_and_found_by_event(api: httpx.Client, connector: Connector, job: str) -> None:
    events = ok(api.get(f"/v1/jobs/{job}/events", params={"limit": 100}))["items"]
    (lost,) = [event for event in events if event["kind"] == "node_lost"]
    assert "Nothing was printed yet" in api.get(f"/jobs/{job}").text
    rows = [
        [1, lost["at_s"] - 3600, "info", 1, 0, "long before"],
        [2, lost["at_s"] - 1, "warning", 1, 1, "peer <b>closed</b> its connection"],
        [3, lost["at_s"] + 3600, "info", 2, 1, "long after"],
    ]
    bring(connector, job, rows)
    page = api.get(f"/jobs/{job}").text
    assert shown(page) == ["long before", "peer &lt;b&gt;closed&lt;/b&gt; its connection", "long after"]
    assert f"?event={lost['seq']}#part-logs" in page
    panel = f"/jobs/{job}/panels/logs"
    assert [text[:4] for text in shown(api.get(panel, params={"event": lost["seq"]}).text)] == ["peer"]
    assert shown(api.get(panel, params={"search": "LONG", "rank": "1", "level": "", "node": ""}).text) == ["long after"]
    assert shown(api.get(panel, params={"attempt": "1", "level": "warning"}).text)[0].startswith("peer")
    assert shown(api.get(f"/jobs/{job}", params={"node": "big-0", "line": "3"}).text) == ["long after"]
    answer = api.get(panel, params={"rank": "1", "level": "", "choose": "logs"})
    assert answer.headers["HX-Replace-Url"] == f"/jobs/{job}?rank=1#part-logs"
    assert "No line that is kept is like that" in api.get(panel, params={"search": "nowhere"}).text
    for wrong, told in (
        ({"rank": "x"}, "Rank = &#39;x&#39;: must be a whole number"),
        ({"level": "loud"}, "Level = &#39;loud&#39;: must be one of debug, info, warning, error"),
        ({"event": "9999"}, "has no such journal entry"),
        ({"rank": "9" * 16}, "Rank = "),
    ):
        answer = api.get(f"/jobs/{job}", params=wrong)
        assert answer.is_success and told in answer.text, wrong


def test_long_logs_are_read_in_pieces(api: httpx.Client, connector: Connector, job: str) -> None:
    bring(connector, job, [[n, 1e9 + n, "info", 1, 0, f"{n} " + "x" * 90] for n in range(1, 251)])
    bring(connector, job, [[251, 1e9 + 251, "error", 1, 0, "y" * 19_000]])
    newest = api.get(f"/jobs/{job}").text
    assert len(shown(newest)) <= 40
    newest = api.get(f"/jobs/{job}/panels/logs").text
    numbers = [text.split()[0] for text in shown(newest)]
    assert numbers[-2] == "250" and "(cut here)" in newest
    assert len(newest.encode()) < 150_000
    found, query = [], "line=1"
    while query:
        text = api.get(f"/jobs/{job}/panels/logs?{query}").text
        found += [line.split()[0] for line in shown(text)]
        onwards = re.search(r'href="/jobs/[^"?]+\?([^"#]+)#part-logs"[^>]*>Go on', text)
        query = onwards.group(1).replace("&amp;", "&") if onwards else ""
    assert found[:-1] == [str(n) for n in range(1, 251)], "each once, in order"


def test_the_page_says_that_lines_are_not_kept_any_more(
    api: httpx.Client, app: Any, connector: Connector, job: str
) -> None:
    bring(connector, job, [[1, 1e9, "info", 1, 0, "old"]])

    async def forget() -> None:
        database = Database(app.state.services.settings.resolved_database_url)
        await forget_old(database, 86400.0, time.time())
        await database.close()

    asyncio.run(forget())
    answer = api.get(f"/jobs/{job}")
    assert answer.is_success
    assert "its lines are all not kept any more: lines are kept for 1 days" in answer.text


def test_a_job_that_failed_leads_to_its_last_lines(api: httpx.Client, connector: Connector, job: str) -> None:
    told = story(job_mapping(), started_at_s=time.time() - 60)
    told.entries = told.entries[:40]
    told.state("failed", "user_code_error", "rank 3 ended with status 1")
    ok(connector.send(job, told.entries))
    page, jobs_page = api.get(f"/jobs/{job}").text, api.get("/").text
    assert f"/jobs/{job}?event=41#part-logs" in page and "Lines printed around then" in page
    assert "Rank 3 ended with status 1." in page
    assert f"/jobs/{job}#part-logs" in jobs_page and "Rank 3 ended with status 1." in jobs_page


def test_tokens_are_made_shown_once_and_revoked(api: httpx.Client) -> None:
    with browser(api) as client:
        made = send(client, "/tokens", "/tokens", name="for <ci>", what="default member", days="2")
        (secret,) = re.findall(r'<code id="secret">([^<]+)</code>', made.text)
        assert made.headers["cache-control"] == "no-store" and "for &lt;ci&gt;" in made.text
        assert secret not in client.get("/tokens").text
        mine = {"Authorization": f"Bearer {secret}"}
        assert ok(httpx.get(f"{api.base_url}/v1/me", headers=mine))["projects"][0]["role"] == "member"
        (token,) = [each for each in ok(api.get("/v1/tokens"))["items"] if each["name"] == "for <ci>"]
        assert token["expires_at"] < rfc3339(time.time() + 3 * 86400)
        wrong = send(client, "/tokens", "/tokens", name="x", what="default member", days="soon")
        assert wrong.status_code == 422 and "Days = &#39;soon&#39;: must be a number" in wrong.text
        assert send(client, "/tokens", "/tokens", name="", what="default member", days="1").status_code == 422
        assert client.post(f"/tokens/{token['id']}/revoke", data={"csrf": "x"}).status_code == 403
        assert "revoked" in send(client, "/tokens", f"/tokens/{token['id']}/revoke").text
    assert httpx.get(f"{api.base_url}/v1/me", headers=mine).status_code == 401


def test_members_are_added_changed_and_removed(api: httpx.Client) -> None:
    place = "/projects/research"
    with browser(api) as client:
        assert str(send(client, "/projects", "/projects", id="research").url).endswith(place)
        assert send(client, "/projects", "/projects", id="No Good").status_code == 422
        page = send(client, place, f"{place}/members", email="some.one@example.org", role="viewer").text
        assert "some.one@example.org" in page
        (member,) = ok(api.get("/v1/projects/research/members"))["items"]
        theirs = f"{place}/members/{member['user_id']}"
        send(client, place, theirs, role="admin")
        assert ok(api.get("/v1/projects/research/members"))["items"][0]["role"] == "admin"
        refused = send(client, place, f"{place}/members", email="nobody", role="viewer")
        assert refused.status_code == 422 and "is no e-mail address" in refused.text
        send(client, place, f"{theirs}/remove")
        assert ok(api.get("/v1/projects/research/members"))["items"] == []


def test_money_is_told_by_project(api: httpx.Client, connector: Connector, job: str) -> None:
    ended = ok(api.post("/v1/jobs", json=job_mapping(name="ended")))["id"]
    ok(connector.send(ended, story(job_mapping(), started_at_s=time.time() - 60).entries))
    for path in ("/nodes", "/projects", "/nodes"):
        page = api.get(path).text
        assert "Of the 2 newest jobs" in page or "of the 2 newest jobs" in page
        (row,) = re.findall(r'<tr><th scope="row"><a href="/projects/default">.*?</tr>', page)
        assert "$" in row and ">2</td>" in row
