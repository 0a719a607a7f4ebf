"""Where a rank computes and how tensors come and go there, as far as it shows without CUDA (else `tests/gpu`)."""

from __future__ import annotations

import pytest
import torch

from shoal_workers.devices import CPU, HOST, Downloads, Stopwatch, compute_device, upload
from shoal_workers.errors import DeviceMissing


def test_a_rank_computes_on_cuda_where_its_node_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_device("a:0", is_cpu=True, simulated=False) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for simulated in (True, False):
        assert compute_device("a:1", is_cpu=False, simulated=simulated) == torch.device("cuda:1")
        assert compute_device("a:1", is_cpu=True, simulated=simulated) == CPU
        with pytest.raises(
            DeviceMissing, match=r"a:2 is to compute, but its node shows 2 CUDA devices; what its label"
        ):
            compute_device("a:2", is_cpu=False, simulated=simulated)


def test_a_gpu_is_simulated_on_the_cpu_only_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compute_device("a:3", is_cpu=False, simulated=True) == CPU
    with pytest.raises(DeviceMissing, match=r"a:3 is to compute, but its node shows 0 CUDA devices: its torch is one"):
        compute_device("a:3", is_cpu=False, simulated=False)


def test_what_lies_on_the_host_already_is_not_copied() -> None:
    rows = torch.arange(12.0).view(4, 3)
    assert HOST.leaving(rows[1:3]).data_ptr() == rows[1:3].data_ptr()
    assert HOST.leaving(rows.t()).is_contiguous()
    assert HOST.arrived(rows) is rows
    assert upload(rows, CPU) is rows


def test_state_on_the_host_is_copied_by_whoever_finishes() -> None:
    state, slot = torch.arange(5.0), torch.zeros(5)
    finish = Downloads(CPU).begin([(slot, state)])
    assert not slot.any()
    finish()
    state.zero_()
    assert slot.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_cpu_computes_while_it_does_not_wait() -> None:
    now_s, waited_s = 0.0, 5.0
    stopwatch = Stopwatch(CPU, lambda: now_s)

    def work() -> None:
        nonlocal now_s, waited_s
        now_s, waited_s = now_s + 3.0, waited_s + 1.0

    for _ in range(2):
        stopwatch.run(work, lambda: waited_s)
    now_s += 100.0
    assert (stopwatch.take(), stopwatch.take()) == (4.0, 0.0)
