"""What each route asks of whoever calls it: the whole table. A route that is not in it is refused to everybody."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_service.access import Role, Rule, Scope

_MEMBER, _ADMIN = Role.MEMBER, Role.ADMIN


def _read_job(*, connectors: bool = False) -> Rule:
    return Rule(scope=Scope.JOB, connectors=connectors)


def _change_job(action: str) -> Rule:
    return Rule(scope=Scope.JOB, role=_MEMBER, action=action)


def _own(action: str | None = None) -> Rule:
    return Rule(scope=Scope.SIGNED_IN, action=action)


def _server(action: str | None = None) -> Rule:
    return Rule(scope=Scope.SERVER, role=_ADMIN, action=action)


def _administer(action: str) -> Rule:
    return Rule(scope=Scope.PROJECT, role=_ADMIN, action=action)


def _webhook(verb: str) -> Rule:
    return Rule(scope=Scope.SOMEWHERE, role=_ADMIN, action=f"webhook.{verb}")


_ADMINISTERS = Rule(scope=Scope.SOMEWHERE, role=_ADMIN)

RULES: Mapping[str, Rule] = {
    # jobs
    "POST /v1/jobs": Rule(scope=Scope.CHOSEN, role=_MEMBER, action="job.create"),
    "GET /v1/jobs": _own(),
    "GET /v1/jobs/{job_id}": _read_job(connectors=True),
    "POST /v1/jobs/{job_id}/cancel": _change_job("job.cancel"),
    "POST /v1/jobs/{job_id}/pause": _change_job("job.pause"),
    "POST /v1/jobs/{job_id}/resume": _change_job("job.resume"),
    "POST /v1/jobs/{job_id}/clone": _change_job("job.clone"),
    "POST /v1/jobs/{job_id}/checkpoint": _change_job("job.checkpoint"),
    "POST /v1/jobs/{job_id}/limits": _change_job("job.limits"),
    "POST /v1/jobs/{job_id}/resize": _change_job("job.resize"),
    "GET /v1/jobs/{job_id}/attempts": _read_job(),
    "GET /v1/jobs/{job_id}/logs": _read_job(),
    "GET /v1/jobs/{job_id}/events": _read_job(connectors=True),
    "GET /v1/jobs/{job_id}/metrics": _read_job(),
    "GET /v1/jobs/{job_id}/plan": _read_job(),
    "GET /v1/jobs/{job_id}/plan.svg": _read_job(),
    "GET /v1/jobs/{job_id}/recoveries": _read_job(),
    "GET /v1/jobs/{job_id}/bulk-losses": _read_job(),
    "GET /v1/jobs/{job_id}/checkpoints": _read_job(),
    "GET /v1/jobs/{job_id}/cost": _read_job(),
    # what it holds was seen by viewers, but it is made to leave the house
    "GET /v1/jobs/{job_id}/debug-dump": _change_job("job.debug_dump"),
    "POST /v1/plans": Rule(scope=Scope.SOMEWHERE, role=_MEMBER),
    # clusters and their connectors; what these bring is in journals already
    "PUT /v1/clusters/{cluster_id}": Rule(scope=Scope.CLUSTER),
    "GET /v1/clusters/{cluster_id}/wishes": Rule(scope=Scope.CLUSTER),
    "POST /v1/jobs/{job_id}/journal": Rule(scope=Scope.JOBS_CLUSTER),
    "POST /v1/jobs/{job_id}/logs": Rule(scope=Scope.JOBS_CLUSTERS),
    "GET /v1/clusters": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/clusters/{cluster_id}": Rule(scope=Scope.SOMEWHERE, connectors=True),
    "GET /v1/nodes": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/spending": _own(),
    "GET /v1/prices": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/drills": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/drill-history": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/pools": Rule(scope=Scope.SOMEWHERE),
    "GET /v1/pool-events": Rule(scope=Scope.SOMEWHERE),
    # a node may have jobs of several projects
    "POST /v1/nodes/{node_id}/preempt": _server("node.preempt"),
    # people; of tokens, what may be made and revoked by whom is tokens.py's
    "GET /v1/me": Rule(scope=Scope.SIGNED_IN, connectors=True),
    "GET /v1/projects": _own(),
    "POST /v1/projects": _server("project.create"),
    "GET /v1/projects/{project_id}": Rule(scope=Scope.PROJECT),
    "DELETE /v1/projects/{project_id}": _server("project.delete"),
    "GET /v1/projects/{project_id}/members": Rule(scope=Scope.PROJECT),
    "POST /v1/projects/{project_id}/members": _administer("member.add"),
    "PUT /v1/projects/{project_id}/members/{user_id}": _administer("member.change"),
    "DELETE /v1/projects/{project_id}/members/{user_id}": _administer("member.remove"),
    # they name what the operator has set on the control plane and on nodes
    "GET /v1/projects/{project_id}/storages": Rule(scope=Scope.PROJECT),
    "GET /v1/projects/{project_id}/storages/{name}": Rule(scope=Scope.PROJECT),
    "PUT /v1/projects/{project_id}/storages/{name}": _server("storage.set"),
    "DELETE /v1/projects/{project_id}/storages/{name}": _server("storage.delete"),
    "GET /v1/users": _server(),
    "PATCH /v1/users/{user_id}": _server("user.change"),
    "DELETE /v1/users/{user_id}": _server("user.delete"),
    "GET /v1/tokens": _own(),
    "POST /v1/tokens": _own("token.create"),
    "DELETE /v1/tokens/{token_id}": _own("token.revoke"),
    "GET /v1/audit-events": Rule(scope=Scope.SOMEWHERE, role=_ADMIN),
    # webhooks: whose may be whose, webhooks.py says
    "GET /v1/webhooks": _ADMINISTERS,
    "POST /v1/webhooks": _webhook("create"),
    "GET /v1/webhooks/{webhook_id}": _ADMINISTERS,
    "PATCH /v1/webhooks/{webhook_id}": _webhook("change"),
    "DELETE /v1/webhooks/{webhook_id}": _webhook("delete"),
    "POST /v1/webhooks/{webhook_id}/secret": _webhook("renew_secret"),
    "POST /v1/webhooks/{webhook_id}/ping": _webhook("ping"),
    "GET /v1/webhooks/{webhook_id}/deliveries": _ADMINISTERS,
    "POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}/retry": _webhook("retry"),
    "POST /v1/login-links": _own("login_link.create"),
    "GET /metrics": Rule(scope=Scope.SOMEWHERE, scrapers=True),
    # pages
    "GET /": _own(),
    "GET /stream": _own(),
    "GET /nodes": Rule(scope=Scope.SOMEWHERE),
    "GET /jobs/{job_id}": _read_job(),
    "GET /jobs/{job_id}/stream": _read_job(),
    "GET /jobs/{job_id}/panels/{name}": _read_job(),
    "GET /jobs/{job_id}/compare": _read_job(),
    "GET /new": Rule(scope=Scope.SOMEWHERE, role=_MEMBER),
    "POST /new/preview": Rule(scope=Scope.CHOSEN, role=_MEMBER),
    "POST /new": Rule(scope=Scope.CHOSEN, role=_MEMBER, action="job.create"),
    "POST /nodes/{node_id}/preempt": _server("node.preempt"),
    "POST /jobs/{job_id}/cancel": _change_job("job.cancel"),
    "POST /jobs/{job_id}/pause": _change_job("job.pause"),
    "POST /jobs/{job_id}/resume": _change_job("job.resume"),
    "POST /jobs/{job_id}/checkpoint": _change_job("job.checkpoint"),
    "POST /jobs/{job_id}/limits": _change_job("job.limits"),
    "GET /tokens": _own(),
    "POST /tokens": _own("token.create"),
    "POST /tokens/{token_id}/revoke": _own("token.revoke"),
    "GET /projects": _own(),
    "POST /projects": _server("project.create"),
    "GET /projects/{project_id}": Rule(scope=Scope.PROJECT),
    "POST /projects/{project_id}/members": _administer("member.add"),
    "POST /projects/{project_id}/members/{user_id}": _administer("member.change"),
    "POST /projects/{project_id}/members/{user_id}/remove": _administer("member.remove"),
    "POST /sign-out": _own("sign_out"),
}
