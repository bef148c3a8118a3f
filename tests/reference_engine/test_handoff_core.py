"""KV out of one core and into another, in this process: the output is that of one core alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.reference_engine import change_orders as c
from app.reference_engine import messages as m
from app.reference_engine.assembly import build_rank
from app.reference_engine.core import EngineCore
from app.reference_engine.errors import OrderRefused
from app.reference_engine.handoff_messages import (
    CollectKv,
    DeliverKv,
    KvDelivered,
    KvSource,
    KvWritten,
    PartFile,
)
from app.reference_engine.limits import CoreSettings
from app.reference_engine.tiny_adapter import write_tiny_adapter
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from tests.reference_engine.adapters import loading

Make = Callable[..., EngineCore]
PROMPT = tuple(3 + number * 37 % 200 for number in range(43))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture
def make(tiny: Path) -> Make:
    def made(checkpoint: Path = tiny, **settings: Any) -> EngineCore:
        core = CoreSettings(torch_threads=1, **{"block_size": 16, "kv_blocks": 16} | settings)
        return build_rank(checkpoint, core).core(core)

    return made


def wanted(name: str = "a", *, temperature: float = 0.0, **options: object) -> m.GenerationRequest:
    request = m.GenerationRequest(
        request_id=name,
        prompt_ids=PROMPT,
        sampling=m.Sampling(temperature=temperature, seed=7),
        stopping=m.Stopping(max_tokens=24, ignore_eos=True),
    )
    return replace(request, **options)  # type: ignore[arg-type]


def run(core: EngineCore) -> list[m.RequestReport]:
    reports: list[m.RequestReport] = []
    while core.runnable:
        reports += core.step()
    return reports


def ids(reports: list[m.RequestReport]) -> list[int]:
    return [one.token_id for said in reports if isinstance(said, m.Tokens) for one in said.tokens]


def submit(core: EngineCore, request: m.GenerationRequest) -> None:
    assert core.apply(m.Submit(request)) == (m.Submitted(m.SubmitStatus.ACCEPTED), [])


def alone(core: EngineCore, temperature: float) -> list[int]:
    submit(core, wanted(temperature=temperature))
    return ids(run(core))


def part(path: Path) -> PartFile:
    path.touch()
    return PartFile(str(path), path.stat().st_ino)


def prefilled(core: EngineCore, path: Path, name: str = "a") -> KvSource:
    submit(core, wanted(name, export_to=(part(path),)))
    (end,) = run(core)
    assert isinstance(end, m.Prefilled)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(PROMPT), 0)
    return collected(core, path, name)


def collected(core: EngineCore, path: Path, name: str = "a") -> KvSource:
    written, _ = core.apply(CollectKv(name))
    assert isinstance(written, KvWritten)
    assert path.stat().st_size == written.bytes
    return KvSource((part(path),), (written.weights,), len(PROMPT))


def continued(core: EngineCore, source: KvSource, temperature: float = 0.0) -> list[int]:
    submit(core, wanted(temperature=temperature, awaits_kv=True))
    assert not core.runnable, "it waits for its KV"
    assert core.apply(DeliverKv("a", source))[0] == KvDelivered(taken=True)
    reports = run(core)
    (end,) = [one for one in reports if isinstance(one, m.Finished)]
    assert end.usage.cached_prompt_tokens == len(PROMPT) - 1
    return ids(reports)


def load(core: EngineCore) -> m.LoadNumbers:
    numbers, _ = core.apply(m.ReadLoad())
    assert isinstance(numbers, m.LoadNumbers)
    return numbers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decode_block_size", [16, 4])
def test_decode_goes_on_token_for_token(
    temperature: float, decode_block_size: int, make: Make, tmp_path: Path
) -> None:
    """Also into blocks of another size, and while others run in both engines."""
    expected = alone(make(), temperature)
    prefill, decode = make(), make(block_size=decode_block_size, kv_blocks=64)
    submit(prefill, wanted("b", temperature=1.0))
    source = KvSource((), (), 0)
    path = tmp_path / "part"
    submit(prefill, wanted(export_to=(part(path),)))
    run(prefill)
    source = collected(prefill, path)
    submit(decode, wanted("b", temperature=1.0))
    decode.step()
    submit(decode, wanted(temperature=temperature, awaits_kv=True))
    decode.step()
    decode.apply(DeliverKv("a", source))
    own = [one for one in run(decode) if one.request_id == "a"]
    assert ids(own) == expected
    assert load(prefill).used_kv_blocks == load(decode).used_kv_blocks == 0


def test_the_prompt_is_not_computed_again(make: Make, tmp_path: Path) -> None:
    decode = make()
    continued(decode, prefilled(make(), tmp_path / "part"))
    # One step for each token; the first of them is the prompt's last one.
    assert load(decode).steps == 24


def test_what_was_taken_in_can_be_found_by_later_prompts(make: Make, tmp_path: Path) -> None:
    decode = make()
    expected = continued(decode, prefilled(make(), tmp_path / "part"))
    submit(decode, wanted("b"))
    reports = run(decode)
    assert ids(reports) == expected
    end = reports[-1]
    assert isinstance(end, m.Finished)
    assert end.usage.cached_prompt_tokens == 32


def test_preempted_it_computes_the_prompt_itself(make: Make, tmp_path: Path) -> None:
    expected = alone(make(), 0.0)
    # Room for two prompts, and not for two whole outputs.
    decode = make(kv_blocks=9, max_model_len=96)
    source = prefilled(make(), tmp_path / "part")
    submit(
        decode,
        wanted("older", temperature=1.0, stopping=m.Stopping(max_tokens=50, ignore_eos=True)),
    )
    decode.step()
    submit(decode, wanted(awaits_kv=True))
    decode.apply(DeliverKv("a", source))
    own = [one for one in run(decode) if one.request_id == "a"]
    assert ids(own) == expected
    assert load(decode).preemptions > 0


def test_kv_of_other_weights_is_refused(make: Make, other: Path, tmp_path: Path) -> None:
    source = prefilled(make(other), tmp_path / "part")
    decode = make()
    submit(decode, wanted(awaits_kv=True))
    with pytest.raises(OrderRefused, match="other weights"):
        decode.apply(DeliverKv("a", source))
    assert not decode.runnable


def update(core: EngineCore, checkpoint: Path, *, flush: bool) -> None:
    files = tuple(c.WeightFile(str(path)) for path in sorted(checkpoint.glob("*.safetensors")))
    core.apply(c.PrepareUpdate(change_id="u", source=c.DiskSource(files), flush=flush))
    core.apply(c.CommitChange("u"))
    core.apply(c.SettleChange("u"))


def load_adapter(core: EngineCore, tiny: Path, path: Path, name: str) -> None:
    order = loading(tiny, path, name, 1)
    core.apply(order)
    core.apply(c.CommitChange(order.change_id))
    core.apply(c.SettleChange(order.change_id))


def test_kv_of_an_adapter_is_of_its_content(make: Make, tiny: Path, tmp_path: Path) -> None:
    """Whatever it is called; and without it, or under another one, it is refused."""
    right, wrong = (write_tiny_adapter(tiny, tmp_path / str(n), n, rank=2) for n in range(2))
    prefill, decode, other = make(), make(), make()
    load_adapter(prefill, tiny, right, "sql")
    load_adapter(decode, tiny, right, "query")
    load_adapter(other, tiny, wrong, "sql")
    submit(decode, wanted("alone", adapter="query", bypass_prefix_cache=True))
    expected = ids(run(decode))
    file = tmp_path / "part"
    submit(prefill, wanted(adapter="sql", export_to=(part(file),)))
    run(prefill)
    source = collected(prefill, file)
    for core, name in ((other, "sql"), (decode, "")):
        submit(core, wanted("refused", adapter=name, awaits_kv=True))
        with pytest.raises(OrderRefused, match="other weights"):
            core.apply(DeliverKv("refused", source))
    submit(decode, wanted(adapter="query", awaits_kv=True))
    assert decode.apply(DeliverKv("a", source))[0] == KvDelivered(taken=True)
    reports = run(decode)
    assert ids(reports) == expected
    (end,) = [one for one in reports if isinstance(one, m.Finished)]
    assert end.usage.cached_prompt_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("flush", [True, False])
def test_kv_that_came_before_an_update_is_not_taken_in(
    flush: bool, make: Make, other: Path, tmp_path: Path
) -> None:
    expected = alone(make(other), 0.0)
    source = prefilled(make(), tmp_path / "part")
    decode = make()
    submit(decode, wanted(awaits_kv=True))
    decode.apply(DeliverKv("a", source))
    update(decode, other, flush=flush)
    assert ids(run(decode)) == expected


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_what_goes_out_is_of_one_version(
    flush: bool, begun: bool, make: Make, other: Path, tmp_path: Path
) -> None:
    """Though the cache may keep what older weights computed, and the prompt be half done."""
    expected = alone(make(other), 0.0)
    prefill = make(max_batched_tokens=16)
    prefilled(prefill, tmp_path / "first")  # so that its blocks can be found
    if not begun:
        update(prefill, other, flush=flush)
    path = tmp_path / "part"
    submit(prefill, wanted("b", export_to=(part(path),), bypass_prefix_cache=begun))
    prefill.step()
    if begun:
        update(prefill, other, flush=flush)
    run(prefill)
    source = collected(prefill, path, "b")
    assert continued(make(other), source) == expected


def test_a_part_that_cannot_be_written_fails_its_request_alone(make: Make, tmp_path: Path) -> None:
    prefill = make()
    path = tmp_path / "part"
    submit(prefill, wanted(export_to=(part(path),)))
    # The path comes to mean another file, as that of a closed one can.
    path.rename(tmp_path / "old")
    path.write_text("somebody else's")
    (end,) = run(prefill)
    assert isinstance(end, m.Prefilled)
    with pytest.raises(OrderRefused, match="can not be written"):
        prefill.apply(CollectKv("a"))
    assert path.read_text() == "somebody else's"
    with pytest.raises(OrderRefused, match="no KV"):
        prefill.apply(CollectKv("a"))
    assert alone(prefill, 0.0) == alone(make(), 0.0)


def test_who_has_ended_gets_nothing(make: Make, tmp_path: Path) -> None:
    source = prefilled(make(), tmp_path / "part")
    decode = make()
    submit(decode, wanted(awaits_kv=True))
    numbers = load(decode)
    assert (numbers.waiting_requests, numbers.waiting_tokens) == (1, len(PROMPT))
    decode.apply(m.Abort(request_ids=("a",), message="enough"))
    assert decode.apply(DeliverKv("a", source))[0] == KvDelivered(taken=False)
    assert load(decode).waiting_requests == 0
