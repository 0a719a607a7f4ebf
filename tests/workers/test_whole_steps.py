"""Agents hear once, in each epoch, which checkpoint is the newest that is whole in the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from shoal_workers.messages import StoreHolds, decode, encode
from shoal_workers.whole_steps import WholeSteps


class Contact:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, message: object) -> None:
        self.told.append(decode(encode(message)))


def test_each_step_is_told_once_in_each_epoch() -> None:
    record = SimpleNamespace(checkpoints=set[int]())
    nodes = {"a": Contact(), "b": Contact()}
    whole = WholeSteps("job_1", cast(Any, record))

    def look(epoch: int | None, *vital: str) -> list[list[Any]]:
        view = None if epoch is None else SimpleNamespace(number=epoch, vital=frozenset(vital))
        whole.look(cast(Any, view), lambda names: [nodes[name] for name in sorted(names)])
        return [[message.step for message in contact.told] for contact in nodes.values()]

    assert look(1, "a", "b") == [[], []], "nothing is whole"
    record.checkpoints |= {10, 20}
    assert look(None) == [[], []], "no epoch runs"
    assert look(1, "a", "b") == look(1, "a", "b") == [[20], [20]]
    assert nodes["a"].told == [StoreHolds(job="job_1", step=20)]
    assert look(2, "b") == [[20], [20, 20]], "an agent that was started anew may be among them"
    record.checkpoints.add(30)
    assert look(2, "b") == [[20], [20, 20, 30]]
