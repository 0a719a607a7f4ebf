"""Watches the process of a script from the outside: what it prints, and how it ends. Owns the thread that asks, which
may be held up where nobody answers, and what of the output is kept for the journal."""

from __future__ import annotations

import contextlib
import queue
import threading

import structlog

from shoal_recovery.decide_script import Ended
from shoal_recovery.journal_scripts import ScriptPrinted
from shoal_workers.script_record import ScriptRecord
from shoal_workers.scripts import Looked, ScriptGone, Scripts, ScriptUnanswered

log = structlog.get_logger()

_LOOK_S = 0.3
_LINES_PER_S = 50.0
_LINES_AT_ONCE = 1000.0


class ScriptWatch:
    """`take` is called by the thread of the supervisor's loop, which holds the lock of the record."""

    def __init__(self, scripts: Scripts, record: ScriptRecord, lock: threading.RLock) -> None:
        self._scripts, self._record, self._lock = scripts, record, lock
        self._news: queue.SimpleQueue[tuple[int, Looked | ScriptGone]] = queue.SimpleQueue()
        self._attempt = 0
        self._stopped = threading.Event()
        self._allowance, self._allowed_s = _LINES_AT_ONCE, 0.0
        self.answered = False
        self.ended: Ended | None = None
        self.failed: dict[str, str] | None = None

    def start(self, attempt: int, after: int) -> None:
        self._turn_to(attempt)
        arguments = (attempt, after, self._stopped)
        threading.Thread(target=self._look, args=arguments, name=f"script-{attempt}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def never(self, attempt: int, error: ScriptGone) -> None:
        """It could not be begun."""
        self._turn_to(attempt)
        self._news.put((attempt, error))

    def _turn_to(self, attempt: int) -> None:
        self.stop()
        self._attempt, self._stopped = attempt, threading.Event()
        self.answered, self.ended, self.failed = False, None, None

    def take(self, now_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                attempt, news = self._news.get_nowait()
                if attempt == self._attempt:
                    self._note(news, now_s)

    def _look(self, attempt: int, after: int, stopped: threading.Event) -> None:
        while not stopped.is_set():
            try:
                looked = self._scripts.look(attempt, after)
            except ScriptUnanswered as error:
                log.info("script does not answer", attempt=attempt, why=str(error))
                stopped.wait(_LOOK_S)
                continue
            except ScriptGone as error:
                self._news.put((attempt, error))
                return
            after = looked.last
            self._news.put((attempt, looked))
            if looked.exit is not None:
                return
            if not looked.lines:
                stopped.wait(_LOOK_S)

    def _note(self, news: Looked | ScriptGone, now_s: float) -> None:
        if isinstance(news, ScriptGone):
            lost = news.code == "script_lost"
            problem = f"The script was lost: {news}." if lost else str(news)
            self.ended = Ended(exit=None, code=news.code, problem=problem, lost=lost, with_node=news.node_lost)
            return
        self.answered = True
        self._print(news, now_s)
        if news.exit is not None:
            self.failed = news.failed
            problem = f"The script ended with exit status {news.exit}."
            if news.failed is not None:
                problem = news.failed["problem"]
            self.ended = Ended(exit=news.exit, code="" if news.failed is None else news.failed["code"], problem=problem)

    def _print(self, news: Looked, now_s: float) -> None:
        """The newest lines, as many as go: a journal is kept for ever, and progress bars know no end."""
        self._allowance = min(_LINES_AT_ONCE, self._allowance + (now_s - self._allowed_s) * _LINES_PER_S)
        self._allowed_s = now_s
        lines = news.lines[max(0, len(news.lines) - int(self._allowance)) :]
        self._allowance -= len(lines)
        left_out = news.left_out + len(news.lines) - len(lines)
        if lines or left_out:
            self._record.append(ScriptPrinted(attempt=self._attempt, lines=lines, left_out=left_out))
