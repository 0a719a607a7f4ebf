"""What journals add up to without a database, for tests of figures."""

from __future__ import annotations

from control_plane import ALL_NODES, Story, job_mapping, snapshot, story

from shoal_recovery.journal import Entry, NodeLost, NodeNoticed, NoticeEnded, StepDone, entry_to_mapping
from shoal_recovery.journal_shares import ShareTaken
from shoal_service import job_figures
from shoal_service.job_figures import Figures, Held


def long_story() -> Story:
    """With all that makes a difference to nodes: losses, notices, a share that shrinks, a pause."""
    told = story(job_mapping(), started_at_s=1e9)
    told.entries.pop()  # it has not succeeded yet
    told.add(NodeNoticed(node="spot-0", source="drill", why="a drill", lead_s=30.0), 5.0)
    told.add(NoticeEnded(node="spot-0", source="drill", outcome="gone"), 30.0)
    told.add(ShareTaken(version=2, nodes=("big-0", "big-1")), 10.0)
    told.train(3)
    told.add(NodeLost(node="big-1", evidence="silence", detect_s=0.3), 20.0)
    told.state("paused", "paused_by_user", "Paused on request.", 7.0)
    told.state("starting", "planned", "starting again", 100.0)
    told.adopt(ALL_NODES, snapshot(), "goes on")
    told.state("running", "stepping", "training", 4.0)
    told.step -= 2
    told.train(6)
    return told


def figures_of(entries: list[Entry], created_at_s: float) -> Figures:
    """As the database adds them up, without one."""
    figures, held = job_figures.fresh(created_at_s), Held()
    points: dict[int, StepDone] = {}
    for entry in entries:
        payload = entry_to_mapping(entry)
        if isinstance(entry.event, StepDone):
            undone = [points.pop(step) for step in sorted(points) if step >= entry.event.step]
            times = [(each.duration_s, each.stalled_s or 0.0) for each in undone]
            figures = job_figures.with_steps_undone(figures, sum(s for s, _ in times), sum(s for _, s in times))
            points[entry.event.step] = entry.event
        figures = job_figures.with_outcomes(figures, held, entry.event.kind, payload)
        figures = job_figures.advance(figures, entry.event.kind, entry.at_s, payload)
        held = job_figures.with_recovery(held, entry.event.kind, payload)
        if job_figures.concerns_nodes(entry.event.kind, payload):
            held = job_figures.with_nodes(held, entry.event.kind, entry.at_s, payload)
            figures = job_figures.with_held(figures, held, entry.at_s)
    return figures
