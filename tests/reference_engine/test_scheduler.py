"""The scheduler against a cache that remembers which tokens were written into which block."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reference_engine.kv_cache import BlockPool
from app.reference_engine.messages import (
    AbortStatus,
    Gate,
    GenerationRequest,
    Sampling,
    Stopping,
    SubmitStatus,
)
from app.reference_engine.scheduler import Chunk, Scheduler, SchedulerLimits

ADAPTERS = ("", "x", "y")


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    *,
    salt: str = "",
    bypass: bool = False,
    adapter: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=max_tokens),
        cache_salt=salt,
        bypass_prefix_cache=bypass,
        adapter=adapter,
    )


class World:
    """Runs a scheduler as an engine would. The "model" is a function of all tokens so far, and
    reads them back from the simulated cache, so a wrong block gives a wrong output."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        block_size: int = 4,
        max_running: int = 8,
        max_waiting: int = 100,
        max_batched_tokens: int = 32,
    ) -> None:
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.pool = BlockPool(blocks)
        limits = SchedulerLimits(
            block_size=block_size,
            max_running=max_running,
            max_waiting=max_waiting,
            max_batched_tokens=max_batched_tokens,
        )
        self.scheduler = Scheduler(limits, self.pool)
        self.cells: dict[tuple[int, int], tuple[str, int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def submit(self, one: GenerationRequest) -> SubmitStatus:
        number = ADAPTERS.index(one.adapter)
        return self.scheduler.submit(one, adapter=number, label=one.adapter)

    def step(self) -> tuple[Chunk, ...]:
        chunks = self.scheduler.plan()
        assert sum(chunk.count for chunk in chunks) <= self.max_batched_tokens
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        assert self.scheduler.load().running_requests <= self.max_running
        for chunk in chunks:
            for at in range(chunk.start, chunk.start + chunk.count):
                written = chunk.sequence.request.adapter, chunk.sequence.tokens[at]
                self.cells[self._cell(chunk, at)] = written
        for chunk in chunks:
            end = chunk.start + chunk.count
            context = [self.cells[self._cell(chunk, at)] for at in range(end)]
            adapter = chunk.sequence.request.adapter
            assert context == [(adapter, token) for token in chunk.sequence.tokens[:end]]
        self.scheduler.advance(chunks)
        for chunk in chunks:
            if chunk.last:
                self._extend(chunk)
        return chunks

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.runnable:
                return
            assert self.step(), "runnable, but nothing to do: it would never end"
        raise AssertionError("does not come to an end")

    def abort(self, name: str) -> None:
        sequence = self.scheduler.find(name)
        assert sequence is not None
        self.scheduler.finish(sequence)

    def _extend(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        token = hash(tuple(sequence.tokens)) % 50
        self.scheduler.append(sequence, token)
        if sequence.output_length == sequence.request.stopping.max_tokens:
            self.outputs[sequence.request_id] = sequence.tokens[sequence.prompt_length :]
            self.cached[sequence.request_id] = sequence.cached_prompt_tokens or 0
            self.scheduler.finish(sequence)

    def _cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.sequence.blocks[position // self.block_size], position % self.block_size


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(hash(tuple(tokens)) % 50)
    return tokens[len(prompt) :]


# Few different tokens and common beginnings: prefixes are shared all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(
    wanted=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=12),
    blocks=st.integers(8, 30),
    block_size=st.sampled_from([1, 2, 4]),
    max_running=st.integers(1, 6),
    spare_budget=st.integers(0, 20),
    seed=st.integers(0, 2**16),
)
def test_every_request_gets_its_output_and_every_block_comes_back(
    wanted: list[tuple[list[int], int]],
    blocks: int,
    block_size: int,
    max_running: int,
    spare_budget: int,
    seed: int,
) -> None:
    """Whatever is chunked, shared, evicted, preempted, aborted, flushed or frozen on the way."""
    longest = max(len(prompt) + count for prompt, count in wanted)
    world = World(
        blocks=max(blocks, -(-longest // block_size)),
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=max_running + spare_budget,
    )
    chance = Random(seed)
    aborted = set()
    for number, (prompt, count) in enumerate(wanted):
        salt = chance.choice(["", "", "other"])
        bypass = chance.random() < 0.2
        adapter = chance.choice(ADAPTERS)
        one = request(str(number), prompt, count, salt=salt, bypass=bypass, adapter=adapter)
        assert world.submit(one) is SubmitStatus.ACCEPTED
        for _ in range(chance.randint(0, 4)):
            world.step()
        match chance.randrange(6):
            case 0:
                counts = world.scheduler.flush()
                assert counts.in_use == world.pool.used
            case 1 if world.scheduler.live:
                live = chance.choice(world.scheduler.sequences())
                aborted.add(live.request_id)
                world.abort(live.request_id)
            case 2:
                world.scheduler.set_gate(Gate.FROZEN)
                assert world.step() == ()
                world.scheduler.set_gate(Gate.OPEN)
    world.run()
    for number, (prompt, count) in enumerate(wanted):
        if str(number) not in aborted:
            assert world.outputs[str(number)] == expected_output(prompt, count)
    assert world.pool.used == 0
    assert world.pool.available == world.pool.total
    load = world.scheduler.load()
    assert (load.running_tokens, load.waiting_tokens, load.used_kv_blocks) == (0, 0, 0)


def test_prompts_are_taken_in_chunks_beside_decoding() -> None:
    world = World(max_batched_tokens=10)
    world.submit(request("decodes", [1, 2], 30))
    world.step()
    world.submit(request("long", list(range(25)), 3))
    sizes = [sorted(chunk.count for chunk in world.step()) for _ in range(4)]
    assert sizes == [[1, 9], [1, 9], [1, 7], [1, 1]]


def test_running_limit_keeps_the_rest_waiting_in_order() -> None:
    world = World(max_running=2)
    for name in "abcd":
        world.submit(request(name, [1], 2))
    assert [chunk.sequence.request_id for chunk in world.step()] == ["a", "b"]
    load = world.scheduler.load()
    assert (load.running_requests, load.waiting_requests) == (2, 2)
    world.step()
    assert [chunk.sequence.request_id for chunk in world.step()] == ["c", "d"]


def test_full_line_and_double_ids_are_refused() -> None:
    world = World(max_waiting=2)
    assert world.submit(request("a", [1])) is SubmitStatus.ACCEPTED
    assert world.submit(request("a", [1])) is SubmitStatus.DUPLICATE
    assert world.submit(request("b", [1])) is SubmitStatus.ACCEPTED
    assert world.submit(request("c", [1])) is SubmitStatus.OVERLOADED
    world.step()
    assert world.submit(request("c", [1])) is SubmitStatus.ACCEPTED


def test_preemption_takes_the_youngest_and_the_result_is_the_same() -> None:
    world = World(blocks=6, block_size=2, max_running=4)
    world.submit(request("old", [1, 2], 9))
    world.submit(request("young", [3, 4], 6))
    world.run()
    assert world.scheduler.load().preemptions > 0
    assert world.outputs["old"] == expected_output([1, 2], 9)
    assert world.outputs["young"] == expected_output([3, 4], 6)
    assert list(world.outputs) == ["old", "young"]


def test_a_preempted_sequence_goes_on_before_those_that_never_ran() -> None:
    world = World(blocks=6, block_size=2, max_running=2)
    for name in ("old", "young", "waits"):
        world.submit(request(name, [ord(name[0]), 4], 6))
    world.run()
    assert world.scheduler.load().preemptions > 0
    assert list(world.outputs) == ["old", "young", "waits"]


def test_a_newcomer_leaves_the_running_ones_a_block_to_grow() -> None:
    world = World(blocks=4, block_size=2)
    world.submit(request("first", [1, 2], 3))
    world.step()
    world.submit(request("second", [3, 4, 5], 3))
    world.run()
    assert world.scheduler.load().preemptions == 0


def test_the_cache_fills_again_after_a_flush() -> None:
    world = World(block_size=4)
    for name in ("first", "again"):
        assert world.scheduler.flush().in_use == 0
        world.submit(request(name, list(range(9)), 1))
        world.run()
        assert world.cached[name] == 0
    world.submit(request("third", list(range(9)), 1))
    world.run()
    assert world.cached["third"] == 8


def test_the_longest_cached_prefix_is_reused_and_the_last_token_always_computed() -> None:
    world = World(block_size=4)
    prompt = list(range(12))
    world.submit(request("first", prompt, 1))
    world.run()
    for name, same, expected in (
        ("same", prompt, 8),
        ("longer", [*prompt, 99], 12),
        ("half", [*prompt[:6], 77, 78], 4),
        ("other", [9, *prompt], 0),
    ):
        world.submit(request(name, same, 1))
        world.run()
        assert world.cached[name] == expected


def test_outputs_can_be_a_later_prompts_prefix() -> None:
    world = World(block_size=4)
    world.submit(request("turn", [1, 2, 3, 4], 8))
    world.run()
    follow_up = [1, 2, 3, 4, *world.outputs["turn"], 5]
    world.submit(request("next", follow_up, 1))
    world.run()
    # The output's last token has no KV: it was never fed back.
    assert world.cached["next"] == 8


@pytest.mark.parametrize("second", [{"salt": "b"}, {"bypass": True}])
def test_salt_and_bypass_keep_from_sharing(second: dict[str, str | bool]) -> None:
    world = World(block_size=4)
    world.submit(request("first", list(range(9)), 1, salt="a" if "salt" in second else ""))
    world.run()
    world.submit(request("second", list(range(9)), 1, **second))  # type: ignore[arg-type]
    world.run()
    assert world.cached["second"] == 0


def test_bypassing_request_still_leaves_its_blocks_to_others() -> None:
    world = World(block_size=4)
    world.submit(request("first", list(range(9)), 1, bypass=True))
    world.run()
    world.submit(request("second", list(range(9)), 1))
    world.run()
    assert world.cached["second"] == 8


def test_frozen_keeps_blocks_and_takes_no_step() -> None:
    world = World()
    world.submit(request("a", [1, 2, 3, 4, 5], 9))
    world.step()
    used = world.pool.used
    assert world.scheduler.set_gate(Gate.FROZEN) is Gate.OPEN
    assert not world.scheduler.runnable
    assert world.step() == ()
    assert world.submit(request("b", [1])) is SubmitStatus.ACCEPTED
    assert world.step() == ()
    assert (world.pool.used, world.scheduler.live) == (used, 2)
    assert world.scheduler.set_gate(Gate.OPEN) is Gate.FROZEN
    world.run()
    assert world.outputs["a"] == expected_output([1, 2, 3, 4, 5], 9)


def test_ends_are_remembered_until_the_id_lives_again() -> None:
    world = World()
    assert world.scheduler.status_of("a") is AbortStatus.NOT_FOUND
    world.submit(request("a", [1], 1))
    assert world.scheduler.status_of("a") is AbortStatus.ABORTED
    world.run()
    assert world.scheduler.status_of("a") is AbortStatus.ALREADY_FINISHED
    world.submit(request("a", [1], 1))
    assert world.scheduler.status_of("a") is AbortStatus.ABORTED


def test_only_the_latest_ends_are_remembered() -> None:
    world = World()
    for number in range(10_001):
        world.submit(request(str(number), [1], 1))
        world.abort(str(number))
    assert world.scheduler.status_of("0") is AbortStatus.NOT_FOUND
    assert world.scheduler.status_of("1") is AbortStatus.ALREADY_FINISHED


def test_a_sequence_ends_once() -> None:
    world = World()
    world.submit(request("a", [1]))
    sequence = world.scheduler.find("a")
    assert sequence is not None
    world.scheduler.finish(sequence)
    with pytest.raises(ValueError, match="not live"):
        world.scheduler.finish(sequence)


@pytest.mark.parametrize(
    "limits", [{"block_size": 0}, {"max_running": 0}, {"max_running": 9, "max_batched_tokens": 8}]
)
def test_limits_that_can_not_work(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        World(**limits)
