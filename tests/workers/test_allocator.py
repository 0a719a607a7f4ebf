"""Processes that step do not fault their memory in again and again."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

from shoal_workers.allocator import ENVIRONMENT, after_a_loss, make_room

CODE = """
import resource
import numpy as np
from shoal_workers.allocator import keep_memory, make_room, return_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(1 << 23)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory()
first, again = faults(), faults()
return_memory()
afterwards = faults()
make_room(1 << 27)
print(first, again, afterwards, faults())
"""


# Ray has threads before anybody is asked to keep memory, and others come later for each epoch.
AMONG_THREADS = """
import resource, threading
import numpy as np
from shoal_workers.allocator import keep_memory, make_room, return_memory

def done_in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

over = threading.Event()
for _ in range(8):
    threading.Thread(target=lambda: (bytearray(1 << 20), over.wait()), daemon=True).start()
keep_memory()
done_in_a_thread(lambda: make_room(1 << 26))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
done_in_a_thread(lambda: [np.ones(1 << 20) for _ in range(6)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_one_thread_makes_ready_another_one_gets() -> None:
    command = [sys.executable, "-c", AMONG_THREADS]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < (6 << 23) / mmap.PAGESIZE / 10


def test_memory_is_kept_until_it_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, again, afterwards, ready = map(int, done.stdout.split())
    assert again < first / 10
    assert afterwards > again
    assert ready < first / 10, "it was made ready"


def test_room_is_made_as_long_as_it_is_wanted() -> None:
    asked = []

    def wanted() -> bool:
        asked.append(len(asked))
        return len(asked) <= 2

    make_room(1 << 26, wanted)
    assert asked == [0, 1, 2], "no more once it is not wanted"
    asked.clear()
    make_room(1 << 10)
    make_room(0, wanted)
    assert not asked


def test_the_state_after_a_loss_takes_what_was_lost_too() -> None:
    assert after_a_loss(60, None, 3) == 90
    assert after_a_loss(60, 1000, 3) == 90
    assert after_a_loss(60, 140, 3) == 80, "no more than there is"
    assert after_a_loss(60, 100, 3) == 60
    assert after_a_loss(60, None, 1) == 60, "nobody is left"


def test_what_is_imported_is_not_collected_then_nor_later() -> None:
    code = """
import gc
from shoal_workers.allocator import importing
with importing():
    during = gc.isenabled()
    import decimal
print(during, gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
