"""Learning in place on a GPU: a training-like loop without a profile."""

from __future__ import annotations

import threading

import pytest

import overlapctl
from overlapctl import env, learning, session
from overlapctl.records import Policy, Role

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs one CUDA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_profile(monkeypatch, tmp_path):
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    session._regions.clear()
    session._machine.cache_clear()
    yield
    session._machine.cache_clear()


@pytest.fixture(scope="module")
def step():
    """GEMMs on one stream; a kernel in the communication role beside them on another."""
    from overlapctl.launch.attach import ensure_attached

    torch.cuda.init()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    buffer = torch.zeros(1 << 22, device="cuda")
    side = torch.cuda.Stream()
    shim = ensure_attached().shim
    shim.set_stream_role(side.cuda_stream, Role.COMMUNICATION)

    def run():
        x = a @ a
        with torch.cuda.stream(side):
            buffer.add_(1)
        y = x @ a
        torch.cuda.synchronize()
        return y

    yield run
    shim.set_stream_role(side.cuda_stream, None)


def test_the_fourth_step_runs_as_learned(step):
    untouched = step()
    region = overlapctl.overlap("auto", strict=True)
    policies = []
    for _ in range(5):
        with region as last:
            result = step()
        policies.append(last.policy)
    assert policies[:3] == [Policy(comm_priority=True)] * 3
    assert policies[3] == policies[4] == last.history[1].policy
    assert len(last.history) == 2
    reason = last.history[1].reason
    assert reason.startswith("learned from 2 steps: beside ")
    rows = last.explain().kernels
    assert {row.role for row in rows} == {Role.COMPUTE, Role.COMMUNICATION}
    assert all(row.failed == 0 for row in rows)
    assert "history:" in str(last.explain())
    assert torch.equal(result, untouched)


def test_an_open_region_switches_while_the_loop_runs(step, monkeypatch):
    quick = learning.Pace(long_after_s=0.2, window_s=0.3, patience_s=5, poll_s=0.05)
    monkeypatch.setattr(learning, "Pace", lambda: quick)
    with overlapctl.overlap("auto", strict=True) as region:
        for _ in range(5000):
            step()
            if len(region.history) == 2:
                break
        step()
        assert region.policy == region.history[1].policy
        assert "learned from" in region.reason
    assert not [t for t in threading.enumerate() if t.name == "overlapctl-learner"]


def test_explicit_reserve_is_applied_and_explained(step):
    with overlapctl.overlap("1KiB", strict=True) as region:
        step()
    shaped = [row for row in region.explain().kernels if row.shaped]
    assert all(row.after == row.before + 1024 for row in shaped)
    assert region.stats().launches >= 3
    assert region.stats().prioritised >= 1
