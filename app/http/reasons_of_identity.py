"""Reasons about who calls: tokens, proofs, sessions, logins, scopes, policy."""

from __future__ import annotations

from collections.abc import Mapping

from app.http.reason import Reason

IDENTITY: Mapping[str, Reason] = {
    "TOKEN_REFUSED": Reason("Token refused", "The token was not accepted.", "Get another."),
    "TOKEN_MISSING": Reason(
        "A token is required",
        "No bearer token came with the request.",
        "Send `Authorization: Bearer …`; the challenge says where tokens come from.",
    ),
    "TOKEN_INVALID": Reason("Token not valid", "The token is no good.", "Get another."),
    "TOKEN_MALFORMED": Reason("Token malformed", "Not a signed JWT.", "Send the access token."),
    "TOKEN_TOO_LARGE": Reason("Token too large", "Larger than taken here.", "Get a smaller one."),
    "TOKEN_ISSUER_FOREIGN": Reason(
        "Unknown issuer", "Its issuer is not trusted here.", "Use a configured issuer."
    ),
    "TOKEN_ALGORITHM_REFUSED": Reason(
        "Algorithm refused",
        "Signed with an algorithm not allowed for its issuer.",
        "Set the issuer's algorithms.",
    ),
    "TOKEN_KEY_UNKNOWN": Reason(
        "Unknown key", "Signed with a key the issuer does not publish.", "Get another token."
    ),
    "TOKEN_SIGNATURE_INVALID": Reason(
        "Signature not valid", "The signature does not verify.", "Get another token."
    ),
    "TOKEN_TYPE_REFUSED": Reason(
        "Not an access token", "Such as an ID or refresh token.", "Send the access token."
    ),
    "TOKEN_BOUND": Reason(
        "Token bound to a key",
        "A sender-constrained token is not a bearer token.",
        "Get an unbound one.",
    ),
    "TOKEN_UNBOUND": Reason(
        "Token not bound to a key",
        "It was shown with a DPoP proof, or its issuer's tokens have to be bound, and it is not.",
        "Get a DPoP-bound token.",
    ),
    "IDENTITY_REFUSED": Reason(
        "Not in this way",
        "What proves the caller of a compatible endpoint came with marks of a browser, by a "
        "proxy, or for another host than this machine.",
        "Call from the machine itself, without a proxy and without `Origin`; browsers log in.",
    ),
    "SECRET_PATH_UNKNOWN": Reason(
        "Secret in the path unknown",
        "A call to a compatible endpoint had a secret in its path that is none. It looks like an "
        "engine that is not there; only the audit and figures say this.",
        "Compare the address with the identity's `secret_file`.",
    ),
    "PROOF_REFUSED": Reason("Proof refused", "The proof was not accepted.", "Make a new one."),
    "PROOF_INVALID": Reason(
        "DPoP proof not valid",
        "Each request takes one proof: by the key that the token is bound to, for this method, "
        "address and token, and made just now.",
        "See `detail`; the address is the public one.",
    ),
    "PROOF_NONCE_NEEDED": Reason(
        "DPoP proof without a nonce",
        "Proofs of this issuer's tokens repeat a nonce of the gateway's; it is another one every "
        "few minutes.",
        "Make a new proof with the nonce of the header `DPoP-Nonce`, and keep it for the next.",
    ),
    "PROOF_REPLAYED": Reason(
        "DPoP proof shown before", "A proof counts once.", "Make a new one for each request."
    ),
    "TOKEN_CLAIM_MISSING": Reason("Claim missing", "A needed claim is absent.", "See `detail`."),
    "TOKEN_CLAIM_INVALID": Reason("Claim not valid", "A claim is unusable.", "See `detail`."),
    "TOKEN_INACTIVE": Reason(
        "Token not active", "Its issuer says so: revoked, expired or unknown.", "Get a new one."
    ),
    "TOKEN_EXPIRED": Reason("Token expired", "Its time is over.", "Get a new one."),
    "TOKEN_NOT_YET_VALID": Reason("Token not valid yet", "Its time is to come.", "Check clocks."),
    "TOKEN_AUDIENCE_FOREIGN": Reason(
        "Other audience", "The token was made for another service.", "Ask for our audience."
    ),
    "TOKEN_IN_QUERY": Reason(
        "Token in the URL",
        "URLs are written to logs and histories, so tokens in them are refused everywhere.",
        "Revoke that token; send another in the Authorization header.",
    ),
    "SESSION_ENDED": Reason(
        "The session is over",
        "Whoever logged in with this browser has logged out, here or at their issuer, was away for "
        "too long, or has a token that could not be renewed.",
        "Log in again at `/auth/login`.",
    ),
    "CROSS_SITE_REFUSED": Reason(
        "Not from a page of this gateway",
        "A browser sends a session's cookie whoever makes it send a request. So with one, whatever "
        "says where the request comes from has to name this gateway, and a change takes "
        "`X-Requested-With: chadburn` besides.",
        "Send it from a page of the gateway's own, or with a bearer token.",
    ),
    "RETURN_TO_REFUSED": Reason(
        "No way back",
        "After a login the browser goes to a path of this gateway and nowhere else.",
        "Name a path that begins with one slash.",
    ),
    "LOGIN_ISSUER_UNKNOWN": Reason(
        "Nobody logs in with that issuer",
        "The gateway is no client of it.",
        "Choose one of those that `/auth/session` names.",
    ),
    "LOGIN_UNKNOWN": Reason(
        "No such login is under way",
        "The answer belongs to no login that this browser began within the last ten minutes.",
        "Begin anew at `/auth/login`.",
    ),
    "LOGIN_REPLAYED": Reason(
        "The login has come back before", "Each counts once.", "Begin anew at `/auth/login`."
    ),
    "LOGIN_ISSUER_MISMATCH": Reason(
        "Not the issuer that was asked",
        "The answer names another issuer, or none where one has to be named (RFC 9207).",
        "Begin anew. If it happens again, tell whoever runs the gateway.",
    ),
    "LOGIN_DENIED": Reason(
        "The issuer said no",
        "It did not log you in, or does not give the gateway what it asks for.",
        "Try again, or ask whoever runs the issuer.",
    ),
    "LOGIN_FAILED": Reason(
        "The login failed",
        "What the issuer answered is no good: refused at its token endpoint, or tokens that do not "
        "belong to this login or are not for this gateway.",
        "Begin anew. The gateway's log says what was wrong.",
    ),
    "LOGIN_FORBIDDEN": Reason(
        "No administrative permission",
        "The login was good; the token it gave holds no scope of this gateway.",
        "Have permission granted at the issuer.",
    ),
    "LOGOUT_TOKEN_REFUSED": Reason(
        "The logout token was not accepted",
        "It has to be the issuer's own, for this gateway, new, and of a session or a person.",
        "See the detail; compare the issuer's settings here and there.",
    ),
    "ISSUER_UNAVAILABLE": Reason(
        "Issuer out of reach",
        "The issuer's keys, or its answer, cannot be had, so the token is neither good nor bad.",
        "Try again after `Retry-After`.",
    ),
    "PERMISSION_DENIED": Reason("Not allowed", "You may not do this.", "Ask for permission."),
    "INSUFFICIENT_SCOPE": Reason(
        "Scope missing",
        "The token is good and lacks a scope that this needs. Inference tokens hold none.",
        "Get a token with the scope that the challenge names.",
    ),
    "ENGINE_PAYLOADS_OFF": Reason(
        "Payloads of its own are off for this engine",
        "What an engine alone can read is passed on only to engines that the gateway's "
        "`engine_payloads` names. None is by default.",
        "Send weights in another way; or have the engine named there, and its sidecar started with "
        "`--allow-pickled`.",
    ),
    "REFUSED_BY_POLICY": Reason(
        "Not allowed by the policy",
        "The token holds the scopes, and the gateway's policy leaves the caller less: not these "
        "scopes, or not on this engine. Another token of the same caller changes nothing.",
        "See `/v1/me` for what is left; have the policy changed.",
    ),
    "GATEWAY_READ_ONLY": Reason(
        "Read only", "The gateway is set to take no orders.", "Unset `read_only`."
    ),
    "PERSON_NEEDED": Reason(
        "A person is needed",
        "To state what nobody can read back is for people; the token is a program's, or does not "
        "show a person.",
        "Use a person's token, or set `clients_may_settle`.",
    ),
}
