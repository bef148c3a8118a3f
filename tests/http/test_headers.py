"""Reading headers: what is understood, what is ignored, what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import ChadburnError
from app.http.cursors import Cursor, cursor_text, read_cursor
from app.http.negotiation import chosen_type, idempotency_key, preference_of
from app.http.paging import number_of, text_of, token_of
from app.http.preconditions import expected_generation, expected_revision
from app.http.refusals import NothingAcceptable, PageTokenInvalid
from app.observability.tracing import trace_id_of

printable = st.text(st.characters(min_codepoint=32, max_codepoint=255))


@pytest.mark.parametrize(
    ("values", "wait_s", "applied"),
    [
        ([], 0, None),
        (["wait=10"], 10, "wait=10"),
        (["wait=999"], 25, "wait=25"),
        (["wait=0"], 0, None),
        (["wait=-1"], 0, None),
        (["wait=ten"], 0, None),
        (["wait"], 0, None),
        (['wait="7"'], 7, "wait=7"),
        (["respond-async, wait=10"], 10, "respond-async, wait=10"),
        (["respond-async", "WAIT = 3; foo"], 3, "respond-async, wait=3"),
        (["wait=3, wait=9"], 3, "wait=3"),
        (["handling=strict"], 0, None),
    ],
)
def test_prefer(values: list[str], wait_s: int, applied: str | None) -> None:
    found = preference_of(values)
    assert (found.wait_s, found.applied) == (wait_s, applied)
    assert found.headers["Vary"] == "Prefer"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ([], "text/event-stream"),
        (["*/*"], "text/event-stream"),
        (["application/json"], "application/json"),
        (["text/event-stream;q=0.5, application/json"], "application/json"),
        (["text/*"], "text/event-stream"),
        (["application/*;q=0.2", "text/event-stream;q=0.1"], "application/json"),
        (["text/event-stream;q=0, */*"], "application/json"),
        (["Application/JSON"], "application/json"),
        (["image/png, application/json;q=0.001"], "application/json"),
        (["image/png"], None),
        (["text/event-stream;q=0, application/json;q=0"], None),
        (["application/json;q=nan"], None),
    ],
)
def test_accept(accept: list[str], chosen: str | None) -> None:
    offered = ("text/event-stream", "application/json")
    if chosen is None:
        with pytest.raises(NothingAcceptable):
            chosen_type(accept, offered)
    else:
        assert chosen_type(accept, offered) == chosen


@pytest.mark.parametrize(
    ("header", "after", "found"),
    [
        (None, None, None),
        ("", "", None),
        ("0a1b2c3d.17", None, Cursor(17)),
        (None, "17", Cursor(17)),
        ("0a1b2c3d.17", "3", Cursor(17)),
        ("", "3", Cursor(3)),
        ("ffffffff.17", None, Cursor(None)),
        ("0a1b2c3d.017", None, Cursor(None)),
        ("0a1b2c3d.", None, Cursor(None)),
        ("0A1B2C3D.17", None, Cursor(None)),
        ("１７", None, Cursor(None)),
        ("9" * 19, None, Cursor(None)),
    ],
)
def test_cursors(header: str | None, after: str | None, found: Cursor | None) -> None:
    assert read_cursor("0a1b2c3d", header, after) == found


@given(st.integers(0, 10**18 - 1))
def test_a_cursor_is_read_as_it_was_written(position: int) -> None:
    written = cursor_text("0a1b2c3d", position)
    assert read_cursor("0a1b2c3d", written, None) == Cursor(position)


@given(printable)
def test_no_header_is_more_than_refused(text: str) -> None:
    preference_of([text])
    read_cursor("0a1b2c3d", text, text)
    trace_id_of(text, lambda: "0" * 32)
    for read in (
        lambda: chosen_type([text], ("application/json",)),
        lambda: idempotency_key(text),
        lambda: expected_revision(text, None),
        lambda: expected_generation(text),
        lambda: number_of(text, {}),
        lambda: text_of(text, {}),
    ):
        with contextlib.suppress(ChadburnError):
            read()


@given(st.integers(0, 2**63 - 1), st.dictionaries(st.text(), st.lists(st.text())))
def test_a_page_token_leads_back_to_its_place(cursor: int, filters: dict[str, list[str]]) -> None:
    token = token_of(cursor, filters)
    assert number_of(token, filters) == cursor
    with pytest.raises(PageTokenInvalid):
        number_of(token, {**filters, "another": ["filter"]})
    with pytest.raises(PageTokenInvalid):
        text_of(token, filters)


@pytest.mark.parametrize(
    ("cursor", "reader"),
    [(-1, number_of), (2**63, number_of), (True, number_of), (1.5, number_of), ("", text_of)],
)
def test_a_forged_page_token(cursor: int | str, reader: object) -> None:
    with pytest.raises(PageTokenInvalid):
        reader(token_of(cursor, {}), {})  # type: ignore[operator]
