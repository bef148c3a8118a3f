"""Nonces that proofs of possession repeat: how long they are good, and where."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import pytest

from app.auth.tokens.errors import NonceNeeded
from app.auth.tokens.nonces import Nonces

BEGUN = datetime(2026, 11, 30, tzinfo=UTC)


def nonces(later_s: int = 0, key: bytes = b"k") -> Nonces:
    return Nonces(key * 32, lambda: BEGUN + timedelta(seconds=later_s))


def told(by: Nonces) -> str:
    with pytest.raises(NonceNeeded) as needed:
        by.require(None)
    return needed.value.nonce


@pytest.mark.parametrize(
    ("later_s", "good"),
    [
        *((-301, False), (-300, True), (-1, True), (0, True), (299, True), (300, True)),
        *((599, True), (600, False), (900, False)),
    ],
)
def test_how_long_a_nonce_is_good(later_s: int, good: bool) -> None:
    nonce = told(nonces())
    with nullcontext() if good else pytest.raises(NonceNeeded):
        nonces(later_s).require(nonce)


def test_one_is_given_out_for_a_while_and_by_all_who_have_the_key() -> None:
    nonce = told(nonces())
    assert len(nonce) == 22
    assert told(nonces(299)) == nonce
    assert told(nonces(300)) != nonce
    for wrong in (nonce[:-1], nonce + "A", "", "ü", None, 7, [nonce]):
        with pytest.raises(NonceNeeded) as needed:
            nonces().require(wrong)
        assert needed.value.nonce == nonce
        assert nonce not in needed.value.message
    with pytest.raises(NonceNeeded):
        nonces(key=b"j").require(nonce)
