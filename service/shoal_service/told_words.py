"""What webhooks are told, in words for people: for a chat (`slack`) or a letter (`email`). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from shoal_service.timeline import duration
from shoal_service.words import sentence


class Form(StrEnum):
    """`JSON` is signed and for programs; `SLACK` is the JSON that incoming webhooks of Slack, Mattermost and others
    take; `EMAIL` goes to an address of mail."""

    JSON = "json"
    SLACK = "slack"
    EMAIL = "email"


_HAPPENED = {
    "job.succeeded": "has succeeded",
    "job.failed": "has failed",
    "job.recovered": "steps again",
    "job.stuck": "makes no progress",
    "job.loss": "has an odd loss",
    "job.budget_warning": "has spent most of its budget",
    "job.budget_spent": "rests: its budget is spent",
    "job.deadline_passed": "rests: its deadline has passed",
}


def words(body: str, public_url: str | None) -> tuple[str, str]:
    """A line on what happened, and all that is known of it with a link to the job, if anybody has said where this
    server is reached."""
    told = json.loads(body)
    data: Mapping[str, Any] = told["data"]
    if "job" not in data:
        return "Shoal: a test", f"Webhook {data['webhook']} hears what Shoal tells it."
    title = f"{data['name']} {_HAPPENED.get(told['type'], told['type'])}"
    lines = [f"Job {data['job']} of project {data['project']}, step {data['step']}, at {told['timestamp']}."]
    if data.get("reason"):
        lines.append(sentence(str(data["reason"])))
    if data.get("total_s") is not None:
        lines.append(f"It took {duration(float(data['total_s']))}; {data.get('redone_steps', 0)} steps redone.")
    if data.get("nodes_lost"):
        lines.append(f"Nodes lost: {', '.join(map(str, data['nodes_lost']))}.")
    if public_url is not None:
        lines.append(f"{public_url.rstrip('/')}/jobs/{data['job']}")
    return " ".join(title.split()), "\n".join(lines)


def slack_body(body: str, public_url: str | None) -> str:
    """The three characters that Slack takes as markup are escaped, as its documentation asks for."""
    title, text = (_escaped(part) for part in words(body, public_url))
    return json.dumps({"text": f"*{title.replace('*', '')}*\n{text}"})


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
