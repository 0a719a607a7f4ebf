"""What a message to another agent costs, found out over a socket like those that bytes between nodes cross anyway.

Owns the stop-watch and how much is sent. One flow, as the ranks' exchange has one for each pair: on loopback both came
out alike. Does not own which pairs are probed (`links`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from shoal_workers import messages as m
from shoal_workers.wire import Connection, connect

_ROUND_TRIPS = 20
_TRIPS_SHARE = 0.3  # of the time; the rest is for bytes
_SAMPLES = 5
_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26
_PART_BYTES = 1 << 20
# A sample must take so many round trips, or the error of these is an error of the rate, and not much longer.
_TRIPS_PER_SAMPLE = 8.0
_STALLED_S = 1.0


def probe_link(
    address: tuple[str, int], limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> m.LinkProbed:
    """About `limit_s` long, but never without one sample. Raises ConnectionClosed."""
    connection = connect(address, _STALLED_S)
    try:
        connection.set_timeout(_STALLED_S)
        return _Probe(connection, time.perf_counter).run(limit_s)
    finally:
        connection.close()


class _Probe:
    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._part = memoryview(bytearray(_PART_BYTES))
        self._sent_bytes = 0
        self._received_bytes = 0

    def run(self, limit_s: float) -> m.LinkProbed:
        began_s = self._clock()
        self._seconds(0)  # the first one also waits for a thread over there
        trip_s = statistics.median(self._repeat(0, _ROUND_TRIPS, began_s + _TRIPS_SHARE * limit_s))
        deadline_s = began_s + limit_s
        num_bytes, whole_s = _FIRST_BYTES, self._seconds(_FIRST_BYTES)
        while whole_s < _TRIPS_PER_SAMPLE * trip_s and num_bytes < _MOST_BYTES and self._clock() < deadline_s:
            num_bytes *= 2
            whole_s = self._seconds(num_bytes)
        samples = self._repeat(num_bytes, _SAMPLES, deadline_s)
        # Not less than a tenth of the whole: trips that were slow by chance must not make bytes free.
        sending_s = max(statistics.median(samples) - trip_s, statistics.median(samples) / 10)
        return m.LinkProbed(
            latency_s=trip_s / 2,
            bytes_per_s=num_bytes / sending_s,
            num_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
        )

    def _repeat(self, num_bytes: int, times: int, deadline_s: float) -> list[float]:
        found = [self._seconds(num_bytes)]
        while len(found) < times and self._clock() < deadline_s:
            found.append(self._seconds(num_bytes))
        return found

    def _seconds(self, num_bytes: int) -> float:
        """Of a message with this payload and its small answer."""
        whole, rest = divmod(num_bytes, _PART_BYTES)
        payload = (*(self._part for _ in range(whole)), *((self._part[:rest],) if rest else ()))
        began_s = self._clock()
        answer = self._connection.request(m.encode(m.Probe()), payload)
        took_s = self._clock() - began_s
        self._sent_bytes += num_bytes
        self._received_bytes += m.decode_as(m.Probed, answer).num_bytes
        return took_s
