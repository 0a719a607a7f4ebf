"""How the script of a job stands in Ray: what workers find on nodes, and one detached actor for each start of it."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.script_spec import ProgramSpec
from shoal_workers.cluster_ray import NAMESPACE
from shoal_workers.code_ray import CodeRefused, environment_of, not_made
from shoal_workers.script_actor import ScriptActor
from shoal_workers.script_words import NODE_DIED
from shoal_workers.scripts import Looked, ScriptGone, ScriptUnanswered

log = structlog.get_logger()

_HEAD_RESOURCE = "node:__internal_head__"
_ANSWER_S = 10.0
_STOP_S = 20.0


class RayScripts:
    """The scripts of one job. A handle of an actor that was started from here tells why it is gone, where its name
    alone would only tell that it is."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._handles: dict[int, Any] = {}

    def resources(self) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}

    def head(self) -> str | None:
        heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]]
        return heads[0] if heads else None

    def start(self, attempt: int, raylet: str, program: ProgramSpec, order: dict[str, Any]) -> None:
        actor: Any = ScriptActor
        try:
            self._handles[attempt] = actor.options(
                name=self._name(attempt),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=0,
                max_concurrency=4,
                runtime_env=environment_of(program.code),
                scheduling_strategy=NodeAffinitySchedulingStrategy(raylet, soft=False),
            ).remote(order, list(program.args))
        except CodeRefused as error:
            raise ScriptGone(error.code, error.problem, node_lost=False) from error
        except (RuntimeError, ValueError, OSError) as error:
            raise ScriptGone("environment_failed", str(error), node_lost=False) from error

    def look(self, attempt: int, after: int) -> Looked:
        try:
            actor = self._handles.get(attempt) or ray.get_actor(self._name(attempt), namespace=NAMESPACE)
            found = ray.get(actor.look.remote(after), timeout=_ANSWER_S)
        except ray.exceptions.RuntimeEnvSetupError as error:
            raise ScriptGone("environment_failed", not_made(error), node_lost=False) from error
        except ray.exceptions.ActorUnschedulableError as error:
            raise ScriptGone("script_lost", str(error), node_lost=True) from error
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            raise ScriptUnanswered(str(error)) from error
        except ValueError as error:
            raise ScriptGone("script_lost", "nothing is left of its process", node_lost=False) from error
        except ray.exceptions.RayActorError as error:
            raise ScriptGone("script_lost", _why(error), node_lost=NODE_DIED in str(error)) from error
        return Looked(
            lines=tuple(found["lines"]),
            left_out=found["left_out"],
            last=found["last"],
            exit=found["exit"],
            failed=found["failed"],
        )

    def end(self, gently: bool) -> None:
        prefix = f"script-{self.job}-"
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == NAMESPACE and named["name"].startswith(prefix):
                with contextlib.suppress(ValueError):  # it ended meanwhile
                    actor = ray.get_actor(named["name"], namespace=NAMESPACE)
                    with contextlib.suppress(ray.exceptions.RayError):
                        if gently:
                            ray.get(actor.stop.remote(), timeout=_STOP_S)
                    ray.kill(actor, no_restart=True)

    def _name(self, attempt: int) -> str:
        return f"script-{self.job}-{attempt}"


def _why(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
