"""Who may do what: roles, principals, and the one function that decides. Pure; which route asks for what is rules.py's,
who somebody is identity.py's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from shoal_service.errors import Conflict, Forbidden, NotFound, Problem

DEFAULT_PROJECT = "default"


class Role(StrEnum):
    """What somebody may do in a project; each may do what the ones before it may."""

    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"

    def allows(self, needed: Role) -> bool:
        return _ORDER.index(self) >= _ORDER.index(needed)


_ORDER = (Role.VIEWER, Role.MEMBER, Role.ADMIN)


def lesser(one: Role, other: Role | None) -> Role | None:
    """What both allow."""
    return None if other is None else min(one, other, key=_ORDER.index)


class TokenRole(StrEnum):
    """What a token may be for. The first three are roles in a project."""

    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"
    CONNECTOR = "connector"
    SERVER_ADMIN = "server_admin"
    METRICS = "metrics"
    """Reads /metrics and nothing else."""


class Kind(StrEnum):
    ADMINISTRATOR = "administrator"
    """Holds admin.token."""
    TOKEN = "token"
    USER = "user"
    CONNECTOR = "connector"
    """Speaks for one cluster, and may do nothing else."""
    METRICS = "metrics"
    """Reads /metrics, of all projects, and may do nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whoever asks. `subject` is `admin`, the id of a token (`tok_`) or that of a user (`user_`); `owner` is `admin` or
    the user whose rights bound it; `roles` are (project, role) pairs, which do not count where `server_admin`; a
    connector has a `cluster_id`."""

    subject: str
    name: str
    kind: Kind
    owner: str
    roles: tuple[tuple[str, Role], ...] = ()
    server_admin: bool = False
    cluster_id: str | None = None

    def role_in(self, project: str | None) -> Role | None:
        if self.server_admin:
            return Role.ADMIN
        return dict(self.roles).get(project) if project is not None else None

    def projects(self, needed: Role = Role.VIEWER) -> frozenset[str] | None:
        """Those in which it has at least this role. None: all."""
        if self.server_admin:
            return None
        return frozenset(project for project, role in self.roles if role.allows(needed))


ADMINISTRATOR = Principal(
    subject="admin", name="administrator", kind=Kind.ADMINISTRATOR, owner="admin", server_admin=True
)


class Scope(StrEnum):
    """What a rule's role has to be had in."""

    SIGNED_IN = "signed_in"
    """Anybody who is known; the answer holds what concerns them."""
    SOMEWHERE = "somewhere"
    """Any project."""
    CHOSEN = "chosen"
    """The project that the request names (`?project=`, or `project` of a form), or the one that is meant without it."""
    PROJECT = "project"
    """The project in the path."""
    JOB = "job"
    """The project of the job in the path."""
    SERVER = "server"
    """The whole server: its administrators alone."""
    CLUSTER = "cluster"
    """The cluster in the path: its connector, and administrators."""
    JOBS_CLUSTER = "jobs_cluster"
    """The cluster that has the job in the path: its connector, and administrators."""
    JOBS_CLUSTERS = "jobs_clusters"
    """Every cluster that has it or had it before."""


_OF_CLUSTERS = (Scope.CLUSTER, Scope.JOBS_CLUSTER, Scope.JOBS_CLUSTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`action` names what is recorded of a request (None: nothing is). `connectors`: those of the cluster in question
    may ask, too. `scrapers`: so may those who read metrics."""

    scope: Scope
    role: Role = Role.VIEWER
    action: str | None = None
    connectors: bool = False
    scrapers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is about, as far as it is known: the ids that it names, the `project` to which that belongs (None
    where there is no such thing), and the cluster in its path or that has the job. `was_on`: the cluster of the
    connector that asks, where the job was on it before."""

    project: str | None = None
    named_project: str | None = None
    job_id: str | None = None
    cluster_id: str | None = None
    was_on: str | None = None


def refusal(rule: Rule, principal: Principal, target: Target) -> Problem | None:
    """Why the principal may not do that; None if it may. What is in a foreign project does not exist."""
    if principal.kind is Kind.CONNECTOR:
        return _refuses_connector(rule, principal, target)
    if principal.kind is Kind.METRICS:
        alone = f"{principal.subject} is a token with the role metrics: it may read /metrics alone"
        return None if rule.scrapers else Forbidden("role", alone)
    match rule.scope:
        case Scope.SIGNED_IN:
            return None
        case Scope.SOMEWHERE:
            found = principal.projects(rule.role)
            return None if found is None or found else _needs(rule.role, "some project", None)
        case Scope.SERVER | Scope.CLUSTER | Scope.JOBS_CLUSTER | Scope.JOBS_CLUSTERS:
            return None if principal.server_admin else Forbidden("role", "needs an administrator of this server")
        case Scope.CHOSEN | Scope.PROJECT:
            return _in_project(rule.role, principal, target.project, project_not_found(target.named_project))
        case Scope.JOB:
            return _in_project(rule.role, principal, target.project, job_not_found(target.job_id or ""))
        case other:
            assert_never(other)


def _in_project(needed: Role, principal: Principal, project: str | None, missing: Problem) -> Problem | None:
    role = principal.role_in(project)
    if role is None or project is None:
        return missing
    return None if role.allows(needed) else _needs(needed, f"project {project}", role)


def _needs(needed: Role, where: str, role: Role | None) -> Forbidden:
    had = "you have none" if role is None else f"you are {role} there"
    return Forbidden("role", f"needs the role {needed} in {where}; {had}")


def _refuses_connector(rule: Rule, principal: Principal, target: Target) -> Problem | None:
    if not rule.connectors and rule.scope not in _OF_CLUSTERS:
        return Forbidden("role", f"{principal.subject} is the token of a connector: it may speak for its cluster alone")
    if rule.scope is Scope.SIGNED_IN or target.cluster_id == principal.cluster_id:
        return None
    if rule.scope is Scope.JOBS_CLUSTERS and target.was_on == principal.cluster_id:
        return None
    if target.job_id is None:
        return Forbidden("role", f"{principal.subject} is the token of cluster {principal.cluster_id} alone")
    if target.project is None:
        return job_not_found(target.job_id)
    # Not 404: a connector goes on with jobs that its control plane never heard of.
    return Conflict("wrong_cluster", f"{target.job_id} does not belong to cluster {principal.cluster_id}")


def job_not_found(job_id: str) -> NotFound:
    """Also what is said of a job in a foreign project."""
    return NotFound("job_not_found", f"id = {job_id!r}: there is no such job", "id")


def project_not_found(project: str | None) -> NotFound:
    return NotFound("project_not_found", f"project = {project!r}: there is no such project", "project")


def seen_projects(principal: Principal, project: str | None) -> frozenset[str] | None:
    """Whose things a list shows: all that the principal sees, or this one of them. None: everything."""
    seen = principal.projects()
    if project is None:
        return seen
    return frozenset({project}) if seen is None or project in seen else frozenset()


def default_project(principal: Principal) -> str:
    """The one that is meant where none is named: the only one, or `default`."""
    return principal.roles[0][0] if len(principal.roles) == 1 and not principal.server_admin else DEFAULT_PROJECT
