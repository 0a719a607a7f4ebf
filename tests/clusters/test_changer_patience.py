"""How long a change of plan waits for a member that shows life: as long as it gets on with what it was told."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import LIFE, SETTINGS, ProcessCluster
from supervised import tiny_job

from shoal_workers.change import Interrupted
from shoal_workers.changer import Changer
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.keeper import Keeper
from shoal_workers.measuring import Measuring
from shoal_workers.record import JobRecord
from shoal_workers.roster import Contact, Roster
from shoal_workers.wire import Connection, connect

LIMIT_S = SETTINGS.reply_timeout_s


class Scene:
    """A rank that shows life all the time, and speaks when it is told to; the clock moves as one listens."""

    def __init__(self, folder: Path, connection: Connection, words_s: list[float]) -> None:
        self.now_s = 0.0
        self._words_s = words_s
        self.rank = Contact(
            node="a", index=0, address=("", 0), connection=connection, last_heard_s=0.0, last_word_s=0.0
        )
        cluster, spec = ProcessCluster(folder, {"a": ("cpu-1t", 1)}), tiny_job("stdlib:", steps=1)
        record = JobRecord(Keeper("job", lambda: 0.0), self._clock)
        self.commits = CheckpointCommits("job", spec, LIFE, record.append)
        roster = Roster(cluster, "job", queue.SimpleQueue(), self._clock)
        measuring = Measuring(
            spec, roster, record, SETTINGS, overrides=lambda: (), clock=self._clock, wall_clock=lambda: 0.0
        )
        self.changer = Changer(
            job="job",
            spec=spec,
            cluster=cluster,
            roster=roster,
            record=record,
            commits=self.commits,
            settings=SETTINGS,
            measuring=measuring,
            clock=self._clock,
            listen=self._listen,
            is_cancelled=lambda: False,
        )

    def _clock(self) -> float:
        return self.now_s

    def _listen(self, timeout_s: float) -> None:
        self.now_s += 1.0
        self.rank.last_heard_s = self.now_s
        if self.now_s in self._words_s:
            self.rank.last_word_s = self.now_s

    def wait_until(self, done_s: float) -> None:
        self.changer._await(lambda: [] if self.now_s >= done_s else [self.rank], frozenset({"a"}), "to restore")


@pytest.fixture
def connection() -> Iterator[Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = connect(("127.0.0.1", listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield made
        made.close()


def test_who_gets_on_is_waited_for(tmp_path: Path, connection: Connection) -> None:
    scene = Scene(tmp_path, connection, [LIMIT_S * part for part in (1, 2, 3)])
    scene.wait_until(4 * LIMIT_S)
    assert scene.now_s == 4 * LIMIT_S
    scene.commits.close()


def test_heartbeats_alone_are_no_answer(tmp_path: Path, connection: Connection) -> None:
    scene = Scene(tmp_path, connection, [3.0])
    with pytest.raises(Interrupted, match=r"said nothing for 10\.0 s when it was to restore") as caught:
        scene.wait_until(4 * LIMIT_S)
    assert caught.value.gone == (scene.rank,)
    assert scene.now_s == 3.0 + LIMIT_S + 1.0
    scene.commits.close()
