"""Processes that step do not fault their memory in again and again."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
import numpy as np
from shoal_workers.allocator import keep_memory, return_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(1 << 23)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory()
first, again = faults(), faults()
return_memory()
afterwards = faults()
return_memory(1 << 27)
print(first, again, afterwards, faults())
"""


def test_memory_is_kept_until_it_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, again, afterwards, ready = map(int, done.stdout.split())
    assert again < first / 10
    assert afterwards > again
    assert ready < first / 10, "it was made ready"
