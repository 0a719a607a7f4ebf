"""A user's own code on a Ray cluster: what its processes are started with, and the first look at a model in it."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.code_spec import CodeSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import parse_job

_LOOK_S = 1.0
_LIMIT_S = 1800.0
_PIPS_ERROR = re.compile(r"^\s*error: .*", re.IGNORECASE | re.MULTILINE | re.DOTALL)
_MOST_TRIES = 3  # a process that ends while it looks, on a node that stays, ends for the code in it


class CodeRefused(Exception):
    """The user's code cannot be used; `code` is a word for programs, the message a sentence for people."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(problem)
        self.code = code
        self.problem = problem


def environment_of(code: CodeSpec) -> dict[str, Any]:
    """The runtime environment of a job's processes, as Ray takes it. What was sent when the model was looked at is used
    as long as the cluster has it, whatever has become of the folders since; else folders are sent. Raises CodeRefused,
    also where they are not what was looked at."""
    if code.packages and all(map(_is_there, code.packages)):
        working_dir = code.packages[:1] if code.working_dir is not None else ()
        return _environment(code, working_dir, code.packages[len(working_dir) :])
    made = _sent(code)
    if code.packages and packages_of(made) != code.packages:
        problem = "code.working_dir or code.py_modules hold something else than when the job began: submit a new job"
        raise CodeRefused("code_changed", problem)
    return made


def not_made(error: ray.exceptions.RuntimeEnvSetupError) -> str:
    """For the user. Before the first error of pip are calls of Ray's own, and all that pip did until then."""
    pips = _PIPS_ERROR.search(str(error))
    return f"the job's environment cannot be made: {_in_short(pips[0] if pips else error)}"


def packages_of(environment: dict[str, Any]) -> tuple[str, ...]:
    """Names that depend on what is in them, but for archives that nodes fetch themselves."""
    found = (environment.get("working_dir"), *environment.get("py_modules", ()))
    return tuple(each for each in found if each is not None)


def _sent(code: CodeSpec) -> dict[str, Any]:
    """With folders where nodes fetch them. Raises CodeRefused."""
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    working_dir = () if code.working_dir is None else (_place("working_dir", code.working_dir),)
    modules = (_place(f"py_modules[{index}]", uri) for index, uri in enumerate(code.py_modules))
    made = _environment(code, working_dir, tuple(modules))
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-code-") as scratch:
            if working_dir:
                made = upload_working_dir_if_needed(made, include_gitignore=True, scratch_dir=scratch)
            if code.py_modules:
                made = upload_py_modules_if_needed(made, include_gitignore=True, scratch_dir=scratch)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RuntimeEnvSetupError) as error:
        problem = f"the job's code cannot be sent to its nodes: {_in_short(error)}"
        raise CodeRefused("environment_failed", problem) from error
    return made


def _environment(code: CodeSpec, working_dir: tuple[str, ...], modules: tuple[str, ...]) -> dict[str, Any]:
    # Ray puts in these places what the node's environment has, in the process itself: no table of Ray's has the value.
    variables = {**code.env, **{name: f"${{{held_as}}}" for name, held_as in code.secrets.items()}}
    made: dict[str, Any] = {"env_vars": variables} if variables else {}
    if code.pip:
        made["pip"] = list(code.pip)
    if working_dir:
        (made["working_dir"],) = working_dir
    if modules:
        made["py_modules"] = list(modules)
    return made


def _is_there(package: str) -> bool:
    """Of archives elsewhere that is for nodes to find out."""
    from ray._private.runtime_env.packaging import package_exists

    return not package.startswith("gcs://") or package_exists(package)


def _place(field: str, uri: str) -> str:
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return uri
    path = unquote(parts.path)
    if not os.path.exists(path):
        problem = str(InvalidField(field, uri, f"there is no {path} where the job is supervised"))
        raise CodeRefused("environment_failed", problem)
    return path


@ray.remote(max_restarts=0, num_cpus=0)
class LookActor:
    """Looks at the model of a job in a process with the job's code."""

    def look(self, spec: dict[str, Any]) -> dict[str, Any]:
        """{shape} or {problem}."""
        from shoal_workers.own_look import look
        from shoal_workers.user_code import check_secrets, told

        job = parse_job(spec)
        assert job.model.module is not None
        try:
            check_secrets(job.code.secrets)
            shape = look(job.model.module, job.train.seed, job.train.seq_len, job.train.precision)
        except BaseException as error:  # theirs may raise anything
            problem = told(error)
            if problem is None and not isinstance(error, Exception | SystemExit):
                raise  # Ray wants this process to end
            return {"problem": problem or "".join(traceback.format_exception_only(error)).strip()}
        return {"shape": dataclasses.asdict(shape)}


def look_at(
    spec: dict[str, Any], environment: dict[str, Any], nodes: Callable[[], list[str]], wanted: Callable[[], bool]
) -> dict[str, Any] | None:
    """The mapping of an OwnShape, found on one of the nodes (by Ray's ids) once there is one; None when it is `wanted`
    no more. Raises CodeRefused."""
    actor_class: Any = LookActor
    ended, tried = "", 0
    while wanted():
        there = nodes()
        if not there:
            time.sleep(_LOOK_S)
            continue
        node = there[tried % len(there)]
        actor = actor_class.options(
            runtime_env=environment, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        try:
            answer = _answer(actor.look.remote(spec), wanted, time.monotonic() + _LIMIT_S)
        except ray.exceptions.RuntimeEnvSetupError as error:
            raise CodeRefused("environment_failed", not_made(error)) from error
        except ray.exceptions.RayActorError as error:
            if node in nodes():  # else it went with its node, which is nobody's fault
                ended, tried = _in_short(error), tried + 1
            if tried == _MOST_TRIES:
                problem = f"its process ended {tried} times while the modules were built and run once: {ended}"
                raise CodeRefused("user_code_failed", problem) from error
            continue
        finally:
            ray.kill(actor)
        if answer is None:
            return None
        if "problem" in answer:
            raise CodeRefused("user_code_failed", answer["problem"])
        shape: dict[str, Any] = answer["shape"]
        return shape
    return None


def _answer(reference: Any, wanted: Callable[[], bool], until_s: float) -> dict[str, Any] | None:
    while wanted():
        if time.monotonic() > until_s:
            problem = f"the modules are not built and run once within {_LIMIT_S / 60:.0f} minutes"
            raise CodeRefused("user_code_failed", problem)
        ready, _ = ray.wait([reference], timeout=_LOOK_S)
        if ready:
            found: dict[str, Any] = ray.get(reference)
            return found
    return None


def _in_short(error: BaseException | str) -> str:
    return " ".join(str(error).split())[-1000:]
