"""What of an output is shown, and when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from app.reference_engine.messages import FinishReason, StopKind, StopMatch, Stopping
from app.reference_engine.output import Output, Step
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.reference_engine.tokenizer import REPLACEMENT, Detokenizer, Tokenizer

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(ensure_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 0))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text))[1:]


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_pieces_are_whole_characters_and_make_up_the_text(
    tokenizer: Tokenizer, text: str, prompt: str
) -> None:
    found = pieces(tokenizer, ids(tokenizer, text), ids(tokenizer, prompt))
    assert "".join(found) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in found)


@given(data=st.data())
def test_bytes_that_are_no_text_come_out_as_one_decoding_would_show_them(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(2, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(pieces(tokenizer, tokens, [])) == tokenizer.decode(tokens)


def test_bytes_that_never_become_text_are_not_held_back_for_ever(tokenizer: Tokenizer) -> None:
    lonely = ids(tokenizer, "\u0400")[:1]
    assert tokenizer.decode(lonely) == REPLACEMENT
    found = pieces(tokenizer, lonely * 100, [])
    assert sum(map(len, found)) == 100
    assert max(map(len, found)) < 20


def test_a_decoder_that_strips_the_first_space_sees_the_prompt() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, "▁Hello"))
    inner.decoder = decoders.Metaspace()
    assert pieces(Tokenizer(inner), [1, 1], [0]) == [" world", " world", ""]


def play(tokenizer: Tokenizer, text: str, stopping: Stopping) -> list[Step]:
    output = Output(tokenizer, (), stopping, (EOS,))
    steps = []
    for token in [*ids(tokenizer, text), EOS]:
        steps.append(output.push(token))
        if steps[-1].reason is not None:
            break
    return steps


def shown(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def test_end_of_sequence_ends_and_is_not_shown(tokenizer: Tokenizer) -> None:
    steps = play(tokenizer, " full ahead", Stopping(max_tokens=99))
    assert shown(steps) == " full ahead"
    last = steps[-1]
    assert (last.reason, last.show_token) == (FinishReason.STOP, False)
    assert last.stop == StopMatch(StopKind.EOS, token_id=EOS)


def test_ignored_end_of_sequence_is_an_ordinary_token(tokenizer: Tokenizer) -> None:
    output = Output(tokenizer, (), Stopping(max_tokens=2, ignore_eos=True), (EOS,))
    assert output.push(EOS).reason is None
    assert output.push(EOS).reason is FinishReason.LENGTH


@pytest.mark.parametrize("include", [False, True])
def test_stop_token(tokenizer: Tokenizer, include: bool) -> None:
    (token,) = ids(tokenizer, " ahead")
    stopping = Stopping(max_tokens=99, stop_token_ids=(token,), include_stop_in_output=include)
    steps = play(tokenizer, " full ahead and more", stopping)
    assert shown(steps) == (" full ahead" if include else " full")
    assert steps[-1].show_token is include
    assert steps[-1].stop == StopMatch(StopKind.TOKEN, token_id=token)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [" ahead", "ll ah", "d a", "ahead and"])
def test_stop_text_wherever_the_tokens_are_cut(
    tokenizer: Tokenizer, stop: str, include: bool
) -> None:
    text = " full ahead and more"
    stopping = Stopping(max_tokens=99, stop_texts=(stop, "zz"), include_stop_in_output=include)
    steps = play(tokenizer, text, stopping)
    at = text.index(stop)
    assert shown(steps) == text[: at + len(stop) if include else at]
    assert steps[-1].stop == StopMatch(StopKind.TEXT, text=stop)


# Characters that the tokenizer never puts together: one token each.
letters = st.text("XY", max_size=30)


@given(text=letters, stops=st.lists(st.text("XY", min_size=1, max_size=4)))
def test_stop_text_is_never_shown_in_part_nor_missed(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    assert len(ids(tokenizer, text)) == len(text)
    steps = play(tokenizer, text, Stopping(max_tokens=99, stop_texts=tuple(stops)))
    # Token by token: the one completed first wins, even where another began before it.
    expected = text
    for length in range(1, len(text) + 1):
        places = [text[:length].find(stop) for stop in stops]
        if found := [at for at in places if at >= 0]:
            expected = text[: min(found)]
            break
    assert shown(steps) == expected


def test_nothing_stops_before_the_minimum(tokenizer: Tokenizer) -> None:
    (token,) = ids(tokenizer, " ahead")
    stopping = Stopping(max_tokens=4, min_tokens=2, stop_token_ids=(token,), stop_texts=(" full",))
    output = Output(tokenizer, (), stopping, (EOS,))
    assert set(output.banned_ids) == {EOS, token}
    (full,) = ids(tokenizer, " full")
    assert output.push(full) == Step(text=" full")
    output.push(full)
    assert output.banned_ids == ()
    assert output.push(full).reason is FinishReason.STOP


def test_length_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    steps = play(tokenizer, " full ahead", Stopping(max_tokens=2, stop_texts=(" ahead now",)))
    assert shown(steps) == " full ahead"
    assert steps[-1].reason is FinishReason.LENGTH


def test_cancelled_output_gives_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    output = Output(tokenizer, (), Stopping(max_tokens=9, stop_texts=(" full ahead",)), (EOS,))
    (full,) = ids(tokenizer, " full")
    assert output.push(full).text == ""
    assert output.cancel() == " full"


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
