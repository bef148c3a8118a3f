"""Keys and fingerprints: what counts as the same call."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.domain.errors import IdempotencyKeyReused, MalformedIdempotencyKey
from app.domain.idempotency import KeyRecord, check_key, fingerprint, replay_of
from app.domain.operation import JsonObject, JsonValue
from tests.domain.strategies import json_objects, json_values, names, words

PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
PATH = "/v1/engines/torch-0/pause"
etags = st.none() | st.from_regex(r'"r[0-9]{1,3}"', fullmatch=True)


def reordered(value: JsonValue) -> JsonValue:
    """The same value with the members of every object in the opposite order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [reordered(item) for item in value]
    return value


def same(one: JsonValue, other: JsonValue) -> bool:
    """Equality that keeps 1, 1.0 and true apart, as their JSON texts are."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


class TestKey:
    @given(st.text(PRINTABLE, min_size=1, max_size=128).filter(lambda key: key.strip()))
    def test_printable_ascii_is_taken_as_it_is(self, key: str) -> None:
        assert check_key(key) == key

    @given(st.text(max_size=140))
    def test_nothing_else_is(self, key: str) -> None:
        fine = 1 <= len(key) <= 128 and all(" " <= char <= "~" for char in key) and key.strip()
        assume(not fine)
        with pytest.raises(MalformedIdempotencyKey) as refused:
            check_key(key)
        assert refused.value.reason == "IDEMPOTENCY_KEY_MALFORMED"

    @pytest.mark.parametrize("key", ["", " ", "a\n", "\x7f", "kéy", "a" * 129, "   "])
    def test_the_edges(self, key: str) -> None:
        with pytest.raises(MalformedIdempotencyKey):
            check_key(key)


class TestFingerprint:
    @given(json_objects, etags)
    def test_the_order_of_members_does_not_count(self, body: JsonObject, etag: str | None) -> None:
        turned = cast("JsonObject", reordered(cast("JsonValue", body)))
        assert fingerprint("POST", PATH, body, etag) == fingerprint("POST", PATH, turned, etag)

    @given(json_objects, st.sampled_from([None, 1, 4]))
    def test_white_space_does_not_count(self, body: JsonObject, indent: int | None) -> None:
        sent = json.loads(json.dumps(body, indent=indent, separators=(" , ", " : ")))
        assert fingerprint("POST", PATH, body, None) == fingerprint("POST", PATH, sent, None)

    @given(json_objects, json_objects)
    def test_any_other_body_counts(self, one: Any, other: Any) -> None:
        equal = fingerprint("POST", PATH, one, None) == fingerprint("POST", PATH, other, None)
        assert equal is same(one, other)

    @given(json_objects, words, json_values)
    def test_one_member_more_or_other_counts(
        self, body: JsonObject, name: str, value: JsonValue
    ) -> None:
        changed = {**body, name: value}
        assume(not same(cast("Any", body), cast("Any", changed)))
        assert fingerprint("POST", PATH, body, None) != fingerprint("POST", PATH, changed, None)

    @given(st.lists(json_values, min_size=2, max_size=4))
    def test_the_order_within_a_list_counts(self, items: list[JsonValue]) -> None:
        turned = items[::-1]
        assume(not same(items, turned))
        one = fingerprint("POST", PATH, {"request_ids": items}, None)
        assert one != fingerprint("POST", PATH, {"request_ids": turned}, None)

    @given(json_objects, names, names, etags, etags)
    def test_method_path_and_if_match_count(
        self, body: JsonObject, path: str, other: str, etag: str | None, later: str | None
    ) -> None:
        known = fingerprint("POST", path, body, etag)
        assert known != fingerprint("PUT", path, body, etag)
        assert (known == fingerprint("POST", other, body, etag)) is (path == other)
        assert (known == fingerprint("POST", path, body, later)) is (etag == later)

    def test_parts_do_not_run_into_each_other(self) -> None:
        assert fingerprint("POST", "/a", {}, "b") != fingerprint("POST", '/a","b', {}, None)

    def test_it_is_a_hex_sha256_that_stays_the_same_over_releases(self) -> None:
        """Keys in the ledger outlive the process that wrote them."""
        assert fingerprint("POST", PATH, {"mode": "drain"}, None) == (
            "6bd45a648bc5c443d7c9d751890e7158b9636f4b39aaa0bb7e753a41c0db0f34"
        )

    def test_what_json_cannot_say_is_no_body(self) -> None:
        with pytest.raises(ValueError, match="JSON"):
            fingerprint("POST", PATH, {"deadline_ms": float("nan")}, None)


class TestReplay:
    @given(names)
    def test_a_new_key_stands_for_nothing(self, presented: str) -> None:
        assert replay_of(None, presented) is None

    @given(names, names)
    def test_the_same_call_gives_the_same_operation(self, print_: str, operation: str) -> None:
        assert replay_of(KeyRecord(print_, operation), print_) == operation

    @given(names, names, names)
    def test_another_call_is_refused_and_names_the_first(
        self, known: str, presented: str, operation: str
    ) -> None:
        assume(known != presented)
        with pytest.raises(IdempotencyKeyReused) as refused:
            replay_of(KeyRecord(known, operation), presented)
        assert refused.value.operation_id == operation
