"""Adapters in one rank's core, order by order and step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.adapter_orders import PrepareUnload
from app.reference_engine.assembly import build_rank
from app.reference_engine.core import EngineCore
from app.reference_engine.errors import OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.limits import CoreSettings
from app.reference_engine.staging import Staging
from app.reference_engine.tiny_adapter import write_tiny_adapter
from tests.reference_engine.adapters import loading

SETTINGS = CoreSettings(torch_threads=1, kv_blocks=64)
PROMPT = tuple(range(40, 80))


class Rank:
    """A rank of one, with two adapters on disk; ``plans`` is what it announced to others."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.tiny = tiny
        self.paths = [write_tiny_adapter(tiny, folder / str(n), n, rank=2) for n in range(2)]
        self.built = build_rank(tiny, SETTINGS)
        self.plans: list[m.StepPlan] = []
        self.core = self.built.core(SETTINGS, self.plans.append)

    @property
    def holding(self) -> Holding:
        return self.built.holding

    def load(self, number: int, name: str | None = None) -> None:
        order = loading(self.tiny, self.paths[number - 1], name or f"a{number}", number)
        self.core.apply(order)
        self.settle(order.change_id)

    def settle(self, change_id: str) -> None:
        self.core.apply(c.CommitChange(change_id))
        self.core.apply(c.SettleChange(change_id))

    def submit(self, name: str, adapter: str = "", max_tokens: int = 4) -> m.SubmitStatus:
        request = m.GenerationRequest(
            request_id=name,
            prompt_ids=PROMPT,
            sampling=m.Sampling(temperature=0.0),
            stopping=m.Stopping(max_tokens=max_tokens, ignore_eos=True),
            adapter=adapter,
        )
        result, _ = self.core.apply(m.Submit(request))
        assert isinstance(result, m.Submitted)
        return result.status

    def run(self) -> dict[str, list[int]]:
        said: dict[str, list[int]] = {}
        while self.core.runnable:
            for report in self.core.step():
                if isinstance(report, m.Tokens):
                    ids = [token.token_id for token in report.tokens]
                    said.setdefault(report.request_id, []).extend(ids)
        return said


@pytest.fixture
def rank(tiny: Path, tmp_path: Path) -> Rank:
    return Rank(tiny, tmp_path)


def cached(core: EngineCore) -> int:
    load, _ = core.apply(m.ReadLoad())
    assert isinstance(load, m.LoadNumbers)
    return load.cached_kv_blocks


def test_different_adapters_share_a_step_and_say_what_they_say_alone(rank: Rank) -> None:
    rank.load(1)
    rank.load(2)
    alone: dict[str, list[int]] = {}
    for name in ("", "a1", "a2"):
        rank.submit(name or "none", name)
        alone |= rank.run()
    assert len({tuple(ids) for ids in alone.values()}) == 3
    rank.core.apply(m.FlushPrefixCache())
    rank.plans.clear()
    for name in ("", "a1", "a2"):
        assert rank.submit(name or "none", name) is m.SubmitStatus.ACCEPTED
    assert rank.run() == alone
    together = [sorted(span.adapter for span in plan.spans) for plan in rank.plans]
    assert together == [[0, 1, 2]] * 4


def test_requests_and_orders_that_do_not_fit_together(rank: Rank) -> None:
    assert rank.submit("early", "a1") is m.SubmitStatus.UNKNOWN_ADAPTER
    rank.load(1)
    with pytest.raises(OrderRefused, match="that name"):
        rank.core.apply(loading(rank.tiny, rank.paths[1], "a1", 2))
    with pytest.raises(OrderRefused, match="that number"):
        rank.core.apply(loading(rank.tiny, rank.paths[1], "a2", 1))
    with pytest.raises(OrderRefused, match="that name"):
        rank.core.apply(PrepareUnload(change_id="u", name="a2"))
    rank.submit("running", "a1")
    with pytest.raises(OrderRefused, match="use the adapter"):
        rank.core.apply(PrepareUnload(change_id="u", name="a1"))
    with pytest.raises(OrderRefused, match="use the adapter"):
        rank.core.apply(loading(rank.tiny, rank.paths[1], "a2", 2, evict=("a1",)))
    assert len(rank.run()["running"]) == 4
    # One that came between preparation and commit: it stays, and so does what it needs.
    rank.core.apply(PrepareUnload(change_id="u", name="a1"))
    assert rank.submit("late", "a1") is m.SubmitStatus.ACCEPTED
    with pytest.raises(OrderRefused, match="use the adapter"):
        rank.core.apply(c.CommitChange("u"))
    rank.core.apply(c.UndoChange("u"))
    assert len(rank.run()["late"]) == 4


def test_what_goes_takes_its_prefixes_along(rank: Rank) -> None:
    rank.load(1)
    rank.submit("base")
    rank.run()
    before = cached(rank.core)
    rank.submit("toned", "a1")
    rank.run()
    assert cached(rank.core) > before > 0
    rank.core.apply(loading(rank.tiny, rank.paths[1], "a2", 2, evict=("a1",)))
    rank.settle("load-a2")
    assert set(rank.holding.held.adapters) == {"a2"}
    assert cached(rank.core) == before


def test_a_step_for_an_adapter_that_is_not_there(rank: Rank) -> None:
    plan = m.StepPlan((5,), (m.StepSpan(0, 1, (0,), adapter=3),))
    with pytest.raises(OrderRefused, match="adapter"):
        rank.holding.compute(plan)


def test_a_damaged_copy_is_never_taken_for_the_adapter(rank: Rank) -> None:
    """Kept in host memory while the weights are released."""
    rank.load(1)
    staging = Staging(rank.holding)
    weights = (c.Resource.WEIGHTS,)
    staging.begin(c.PrepareRelease(change_id="r", resources=weights, preserve=True))()
    staging.commit("r")
    staging.settle("r")
    (adapter,) = rank.holding.held.adapters.values()
    assert adapter.tensors == {}
    order = c.PrepareRestore(change_id="s", resources=weights)
    staging.begin(order)()
    staging.undo("s")
    object.__setattr__(adapter, "sha256", "0" * 64)
    with pytest.raises(OrderRefused, match="copy of an adapter is damaged"):
        staging.begin(order)()
    staging.undo("s")
