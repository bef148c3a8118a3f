"""Signatures, held against what another implementation computes.

TensorRT-LLM publishes no vectors. These were computed by OpenSSL, over bytes that were written by
hand from the published scheme:

    printf 'trtllm-runtime-control-v1\\nPOST\\n/release_memory\\n1767225600\\nNONCE\\nBODY' \\
        | openssl dgst -sha256 -hmac KEY
"""

from __future__ import annotations

import re

import pytest

from app.sidecars.trtllm.signing import (
    AUTH,
    NONCE,
    TIMESTAMP,
    Scheme,
    Signer,
    canonical,
    random_nonce,
)

KEY = "replace-with-a-long-random-secret"
ONCE = "0123456789abcdef0123456789abcdef"
BODY = b'{"tags": ["model", "model_weights"]}'
AT = 1_767_225_600
RELEASE, STATUS = ("POST", "/release_memory", BODY), ("GET", "/memory_status", b"")

VECTORS = [
    (
        Scheme.REQUEST,
        RELEASE,
        "a34df611794a36e4f8a8eb4f99f6b5a338bfbc2a5875bb5265b9d23a0318a04b",
    ),
    (
        Scheme.REQUEST,
        STATUS,
        "7f5ac7c30a1737909b611a341087703ee8d79db787a9cf061000fba4b68db271",
    ),
    (Scheme.BODY, RELEASE, "708a25b79a64704fac9d415a9cfbc72eb468c346d7ce25c4a3856faf22e4b8de"),
    (Scheme.BODY, STATUS, "0585c5d77642eca093614a73251a5122307b92a87a81c8e85f1f2028b1d620f5"),
]


def _signer(scheme: Scheme = Scheme.REQUEST, *, at: int = AT, once: str = ONCE) -> Signer:
    return Signer(KEY, scheme, now=lambda: at, new_nonce=lambda: once)


@pytest.mark.parametrize(("scheme", "call", "digest"), VECTORS)
def test_what_is_signed_and_how(scheme: Scheme, call: tuple[str, str, bytes], digest: str) -> None:
    headers = _signer(scheme).headers(*call)
    assert headers[AUTH] == f"sha256={digest}"
    if scheme is Scheme.BODY:
        assert set(headers) == {AUTH}
    else:
        assert (headers[TIMESTAMP], headers[NONCE]) == (str(AT), ONCE)


def test_the_canonical_request_is_five_lines_and_the_body_as_it_is() -> None:
    signed = canonical("post", "/release_memory", str(AT), ONCE, b"\n{}")
    lines = b"trtllm-runtime-control-v1\nPOST\n/release_memory\n1767225600\n" + ONCE.encode()
    assert signed == lines + b"\n\n{}"


def test_every_part_is_covered() -> None:
    calls = (
        RELEASE,
        ("GET", "/release_memory", BODY),
        ("POST", "/resume_memory", BODY),
        ("POST", "/release_memory", BODY + b" "),
    )
    signers = [_signer(at=at, once=once) for at in (AT, AT + 1) for once in (ONCE, ONCE[::-1])]
    seen = {signer.headers(*call)[AUTH] for signer in signers for call in calls}
    assert len(seen) == 16


def test_each_call_has_a_number_of_its_own_in_the_one_form_that_is_taken() -> None:
    signer = Signer(KEY)
    calls = [signer.headers(*STATUS) for _ in range(64)]
    assert len({headers[NONCE] for headers in calls}) == 64
    assert all(re.fullmatch("[0-9a-f]{32}", headers[NONCE]) for headers in calls)
    assert random_nonce() != random_nonce()


def test_a_key_that_could_be_guessed_is_not_signed_with() -> None:
    with pytest.raises(ValueError, match="16"):
        Signer("short")
