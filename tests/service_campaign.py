"""A stream of submissions, and a cluster that runs what was submitted, against a control plane that is killed again and
again; and what must hold of it afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from control_plane import Connector, ControlPlane, job_mapping, start_control_plane
from servers import free_ports

from shoal_planner.cluster import parse_cluster
from shoal_recovery.journal import Entry, StateChanged, StepDone, entry_to_mapping
from shoal_service.standing import MOVED_CODE

STEPS = 30
NODES = parse_cluster({"nodes": [{"name": "n", "count": 8, "device": "A100-80G", "devices": 1}]})


def small_job(name: str) -> dict[str, Any]:
    return job_mapping(name=name, train={"steps": STEPS, "warmup_steps": 1}, model={"layers": 2})


def journal_of_a_run(after: int = 0) -> list[Entry]:
    """Of a supervisor that does all steps of `small_job`, from the entry after this one on."""
    states = [("starting", "planned"), ("running", "stepping")]
    events: list[Any] = [StateChanged(state=state, code=code, reason=code) for state, code in states]
    events += [_done(step) for step in range(1, STEPS + 1)]
    events.append(StateChanged(state="succeeded", code="all_steps_done", reason="all steps are done"))
    return [Entry(seq=seq, at_s=1e9 + seq, event=event) for seq, event in enumerate(events, after + 1)]


def _done(step: int) -> StepDone:
    return StepDone(
        epoch=1, step=step, loss=9 / step, grad_norm=1.0, lr=1e-3, tokens=256, duration_s=0.1, samples=((0, 8),)
    )


@dataclass(kw_only=True)
class Campaign:
    """`acknowledged`: the job of each Idempotency-Key as answered. `started`: how often a cluster began each job;
    `moves`: how often it had been sent to another one before that, of which its journal has an entry each."""

    data_dir: Path
    settings: dict[str, str]
    seed: int
    clusters: int = 2
    acknowledged: dict[str, str] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    homes: dict[str, str] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    num_unanswered: int = 0
    plane: ControlPlane | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _no_more: threading.Event = field(default_factory=threading.Event)

    def run(self, kills: int) -> None:
        """Afterwards the control plane is up, nobody submits any more, and all that was acknowledged has ended."""
        chance = random.Random(self.seed)
        port = free_ports(1)[0]
        self.plane = start_control_plane(self.data_dir, port, **self.settings)
        threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(2)]
        clusters = [threading.Thread(target=self._serve, args=(f"cluster-{n}",)) for n in range(self.clusters)]
        pause = threading.Event()
        with self._ended(threads, clusters):
            for _ in range(kills):
                pause.wait(chance.uniform(0.0, 1.5))
                self.plane.kill()
                self.plane = start_control_plane(self.data_dir, port, **self.settings)

    @contextlib.contextmanager
    def _ended(self, submitters: list[threading.Thread], clusters: list[threading.Thread]) -> Iterator[None]:
        for thread in submitters + clusters:
            thread.start()
        try:
            yield
        finally:
            self._no_more.set()
            for thread in submitters:
                thread.join(120)
            deadline_s = time.monotonic() + 300
            while not self.complaints and time.monotonic() < deadline_s and not self._all_ended():
                self._over.wait(0.2)
            self._over.set()
            for thread in clusters:
                thread.join(120)

    def client(self) -> httpx.Client:
        assert self.plane is not None
        return httpx.Client(base_url=self.plane.url, headers=self.plane.headers, timeout=30)

    def all_jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        with self.client() as http:
            while True:
                page = http.get("/v1/jobs", params={"limit": 200} | ({"cursor": cursor} if cursor else {})).json()
                found += page["items"]
                cursor = page["next_cursor"]
                if cursor is None:
                    return found

    def events(self, job_id: str) -> list[dict[str, Any]]:
        with self.client() as http:
            found = http.get(f"/v1/jobs/{job_id}/events", params={"limit": 1000}).json()["items"]
        return [{name: value for name, value in entry.items() if name != "at"} for entry in found]

    def _all_ended(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return all(job["status"]["state"] == "succeeded" for job in self.all_jobs())
        return False

    def _submit(self, number: int) -> None:
        """One key after the other; each as often as it takes until it is acknowledged, and every third once more."""
        index = 0
        with self.client() as http:
            while not self._no_more.is_set():
                key = f"key-{number}-{index}"
                answer = self._until_answered(http, key)
                if answer is None:
                    return
                self.acknowledged[key] = answer
                if index % 3 == 0 and (again := self._until_answered(http, key)) not in (None, answer):
                    self.complaints.append(f"{key}: {answer} first, then {again}")
                index += 1

    def _until_answered(self, http: httpx.Client, key: str) -> str | None:
        while True:
            try:
                answer = http.post("/v1/jobs", json=small_job(key), headers={"Idempotency-Key": key})
            except httpx.TransportError:
                self.num_unanswered += 1
                if self._over.wait(0.05):
                    return None
                continue
            if answer.status_code == 503:
                self._over.wait(0.1)
                continue
            if answer.status_code != 201:
                self.complaints.append(f"{key}: {answer.status_code} {answer.text}")
                return None
            return str(answer.json()["id"])

    def _serve(self, cluster_id: str) -> None:
        """As a connector: begins what is wished for, and brings journals from where the control plane says it is."""
        chance = random.Random(f"{self.seed} {cluster_id}")
        begun: set[str] = set()
        with self.client() as http:
            connector = Connector(http=http, cluster_id=cluster_id, holder=cluster_id, cluster=NODES)
            while not self._over.is_set():
                try:
                    connector.renew(lease_s=300)
                    answer = http.get(f"/v1/clusters/{cluster_id}/wishes")
                    for wish in answer.json()["jobs"] if answer.is_success else ():
                        self._carry(connector, wish, begun, chance)
                except httpx.TransportError:
                    pass
                self._over.wait(0.05)

    def _carry(self, connector: Connector, wish: dict[str, Any], begun: set[str], chance: random.Random) -> None:
        job_id, last_seq = wish["id"], wish["last_seq"]
        if job_id not in begun:
            if wish["share"]["nodes"] == []:
                return  # as a connector does: what waits for nodes may be sent to another cluster yet
            begun.add(job_id)
            self.started[job_id] += 1
            self.homes[job_id] = connector.cluster_id
            self.moves[job_id] = last_seq
        told = journal_of_a_run(self.moves[job_id])
        while last_seq - self.moves[job_id] < len(told):
            first = last_seq - self.moves[job_id]
            answer = connector.send(job_id, told[first : first + chance.randint(1, 20)])
            if answer.status_code == 503:
                return
            if not answer.is_success:
                self.complaints.append(f"{job_id}: {answer.status_code} {answer.text}")
                return
            last_seq = answer.json()["last_seq"]

    def judge(self) -> dict[str, int]:
        """How much there was of everything. Raises AssertionError for anything that was lost, doubled or has a gap."""
        assert self.complaints == [], self.complaints
        found = self.counts()
        assert found["lost"] == found["twice"] == found["gaps"] == 0, found
        return found

    def counts(self) -> dict[str, int]:
        """Of jobs `acknowledged`, those `lost`; of all, those created or begun `twice`, and those that did not end as
        their cluster told or whose history has `gaps`; of `entries` of histories and of requests `unanswered`."""
        found = self.all_jobs()
        created = Counter(job["name"] for job in found)
        ids = {job["name"]: job["id"] for job in found}
        lost = [key for key, job_id in self.acknowledged.items() if ids.get(key) != job_id]
        twice = [count for counted in (created, self.started) for count in counted.values() if count > 1]
        whole = [
            job
            for job in found
            if (job["status"]["state"], job["status"]["step"]) == ("succeeded", STEPS)
            and job["cluster_id"] == self.homes.get(job["id"])
            and self._is_whole(job["id"])
        ]
        return {
            "jobs": len(found),
            "acknowledged": len(self.acknowledged),
            "lost": len(lost),
            "twice": len(twice),
            "gaps": len(found) - len(whole),
            "entries": len(found) * len(journal_of_a_run()) + sum(self.moves.values()),
            "unanswered": self.num_unanswered,
        }

    def _is_whole(self, job_id: str) -> bool:
        """Whether its history is what its cluster told, and before that only that it was sent there."""
        moves = self.moves.get(job_id, 0)
        kept = self.events(job_id)
        sent = json.loads(json.dumps([entry_to_mapping(entry) for entry in journal_of_a_run(moves)]))
        return kept[moves:] == sent and all(entry["code"] == MOVED_CODE for entry in kept[:moves])
