"""`shoal` by itself: where somebody stands, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cli_show import show_jobs
from shoal.client import Client
from shoal.errors import NotAllowed, NotSignedIn, ServerUnreachable
from shoal.settings import ClientSettings

_ABOUT = "Shoal trains one large model on machines that may vanish."
_START: Sequence[tuple[str, str]] = (
    ("shoal up", "start one here, with a local cluster of unequal nodes"),
    ("shoal login --server URL", "use one elsewhere"),
    ("shoal demo", "see a node killed and a job recover, start to end"),
    ("shoal plan JOB --cluster FILE", "plan without any server"),
)
_SUBMIT: Sequence[tuple[str, str]] = (
    ("shoal submit JOB --dry-run", "plan and price a job; nothing is created"),
    ("shoal submit JOB --watch", "send it and look on"),
)
_FOLLOW: Sequence[tuple[str, str]] = (
    ("shoal watch", "look on at the newest job"),
    ("shoal status ID", "all about one"),
    ("shoal sign-in", "a link to the pages"),
)
_HELP: Sequence[tuple[str, str]] = (("shoal --help", "all commands"),)


def welcome() -> None:
    """Asks the control plane, if there is one, and says what fits."""
    server = ClientSettings().find_server()
    print(_ABOUT)
    try:
        with Client() as client:
            nodes, jobs = client.nodes(), list(client.list(limit=5))
    except ServerUnreachable:
        _say(f"No control plane answers at {server}.", _START)
    except NotSignedIn:
        next_steps = (("shoal login", "keep a token for it on this machine"), *_START[:1])
        _say(f"The control plane at {server} does not know you.", next_steps)
    except NotAllowed as error:
        _say(f"The control plane at {server} answers: {error}.", (("shoal whoami", "who it takes you for"),))
    else:
        connected = sum(node["connected"] for node in nodes)
        here = f"The control plane at {server} has {connected} connected nodes"
        offer = () if connected else ((f"shoal connect --server {server}", "on a Ray cluster: offer it"),)
        if not jobs:
            _say(f"{here} and no jobs yet.", (*offer, *_SUBMIT))
            return
        print(f"{here}. The newest jobs:\n")
        show_jobs(jobs)
        _say("", (*offer, *_FOLLOW))


def _say(where: str, steps: Sequence[tuple[str, str]]) -> None:
    print(*([where] if where else []), "", sep="\n")
    every = (*steps, *_HELP)
    width = max(len(command) for command, _ in every)
    for command, purpose in every:
        print(f"  {command.ljust(width)}   {purpose}")
