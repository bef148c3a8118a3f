"""What each reason means: the titles of problems, and the pages behind their `type`."""

from __future__ import annotations

from collections.abc import Mapping

from app.http.reason import Reason
from app.http.reasons_of_engines import OF_ENGINES
from app.http.reasons_of_identity import IDENTITY


def slug_of(reason: str) -> str:
    return reason.lower().replace("_", "-")


def describe(reason: str) -> Reason:
    """The catalogue's entry; a general one for a reason that an engine made up."""
    return CATALOGUE.get(reason, _UNLISTED)


_UNLISTED = Reason(
    "Refused",
    "The engine gave this reason itself; this release of the gateway has no page for it.",
    "Look it up in the engine's documentation.",
)

_KEY = "Idempotency-Key"

CATALOGUE: Mapping[str, Reason] = {
    **OF_ENGINES,  # what the gateway says itself comes after them
    # requests
    "INVALID_ARGUMENT": Reason(
        "Invalid argument",
        "A value is well formed but not possible here; `errors` says which and why.",
        "Change it.",
    ),
    "SCHEMA_VIOLATION": Reason(
        "The request does not fit the schema",
        "A field or query parameter is missing, of the wrong type, out of its range, or unknown. "
        "Unknown ones are refused because a misspelt option would otherwise be ignored.",
        "See `errors` and the OpenAPI document.",
    ),
    "REASON_REQUIRED": Reason(
        "A reason is required",
        "The gateway's policy demands it for orders of this kind.",
        "Send `reason` with some words of your own.",
    ),
    "MALFORMED_JSON": Reason(
        "The body is not JSON", "The body could not be parsed.", "Send one JSON object."
    ),
    "MALFORMED_REQUEST": Reason(
        "Malformed request", "A header is not in its form, or is there twice.", "Correct it."
    ),
    "UNSUPPORTED_MEDIA_TYPE": Reason(
        "Unsupported media type", "Bodies are JSON.", "Send `Content-Type: application/json`."
    ),
    "BODY_TOO_LARGE": Reason("The body is too large", "It is over the limit.", "Send less."),
    "HEAD_TOO_LARGE": Reason("The headers are too large", "They are over the limit.", "Send less."),
    "REQUEST_TOO_SLOW": Reason(
        "The request came too slowly",
        "Its headers or its body did not arrive within the time that one request gets.",
        "Send it again; nothing of it was carried out.",
    ),
    "ROUTE_NOT_FOUND": Reason("Not found", "No such path.", "See the OpenAPI document."),
    "METHOD_NOT_ALLOWED": Reason(
        "Method not allowed", "The path is there, with other methods.", "See `Allow`."
    ),
    "NOT_ACCEPTABLE": Reason(
        "Not acceptable", "No form that `Accept` names is offered here.", "Change `Accept`."
    ),
    "HOST_NOT_ALLOWED": Reason(
        "Misdirected request",
        "`Host` names a service this one is not. It guards browsers against rebound names.",
        "Use the public address, or add the name to `allowed_hosts`.",
    ),
    "PAGE_TOKEN_INVALID": Reason(
        "Page token not valid",
        "It is damaged, or was given for other filters.",
        "Send the filters that the first page had, or start again without a token.",
    ),
    "NOT_FOUND": Reason("Not found", "There is no such thing.", "Check the id."),
    "ALREADY_EXISTS": Reason("Already exists", "It is there already.", "Read it."),
    "ABORTED": Reason("Aborted", "Another change was quicker.", "Read again, decide again."),
    "FAILED_PRECONDITION": Reason(
        "Not possible in this state", "The state does not allow it.", "Change the state first."
    ),
    "RESOURCE_EXHAUSTED": Reason("Too much", "A limit is reached.", "Try again later."),
    "UNIMPLEMENTED": Reason("Not implemented", "This is not offered.", "Look for another way."),
    "UNAVAILABLE": Reason("Not available", "A part is out of reach.", "Try again later."),
    "DEADLINE_EXCEEDED": Reason("Too late", "It took too long.", "See whether it took effect."),
    "INTERNAL": Reason(
        "Internal error",
        "A defect of the gateway. Of a change that was under way it is not known whether it "
        "took effect.",
        f"Send an order again under the same `{_KEY}`; report the `request_id`.",
    ),
    "OVERLOADED": Reason("Too busy", "Too many requests are under way.", "Wait; try again."),
    "TOO_MANY_STREAMS": Reason("Too many streams", "Too many are open.", "Close some; wait."),
    "TOO_MANY_REFUSALS": Reason(
        "Too many calls were refused",
        "So many calls from this address, or of this caller, were refused for their token or "
        "their scopes that further refusals are not spelled out. What is allowed is still let in.",
        "Correct the token or its scopes; wait for `Retry-After`.",
    ),
    "TOO_MANY_NEW_TOKENS": Reason(
        "Too many new tokens",
        "The token is one that only its issuer can judge, and it was not good here before; or a "
        "browser comes back from a login. So many of these, or so many refused calls, come from "
        "this address that the issuer is not asked now. It is neither good nor bad.",
        "Wait for `Retry-After`; use one token until it expires.",
    ),
    "TOO_MANY_CHANGES": Reason(
        "Too many orders and changes",
        "This caller, or all callers from this address, send orders and changes faster than the "
        "gateway is set to take them. Nothing was done; reads are not limited so.",
        "Send it again after `Retry-After`, an order under the same key.",
    ),
    "TOO_MANY_ENGINE_READS": Reason(
        "Too many wait for engines",
        "The answer is the engine's own, and as many callers wait for that engine, or for engines "
        "at all, as may. One that is slow must not keep everybody else out.",
        "Try again after `Retry-After`; what was last seen of it is there without asking it.",
    ),
    "TOO_MANY_OPEN_OPERATIONS": Reason(
        "Too many operations are open",
        "As many operations of this engine have not ended as may be open at once.",
        "Wait for some of them, or cancel them.",
    ),
    "ANSWER_TIMED_OUT": Reason(
        "The gateway could not answer in time",
        "Of a change that was asked for it is not known whether it was taken on.",
        f"Send an order again under the same `{_KEY}`.",
    ),
    "SHUTTING_DOWN": Reason("Shutting down", "The gateway is about to stop.", "Reconnect."),
    "NOT_READY": Reason("Not ready", "The ledger cannot be used.", "Try again soon."),
    **IDENTITY,
    # keys, revisions
    "IDEMPOTENCY_KEY_MISSING": Reason(
        f"{_KEY} missing",
        "An order without one could not be sent again safely.",
        f"Send `{_KEY}` with a value of your own, new for each order; the same when repeating.",
    ),
    "IDEMPOTENCY_KEY_MALFORMED": Reason(
        f"{_KEY} malformed", "1 to 128 printable ASCII characters.", "Change it."
    ),
    "IDEMPOTENCY_KEY_REUSED": Reason(
        f"{_KEY} used for another request",
        "The key stands for an order with another path, body or If-Match; `operation` names it.",
        "Take a new key for a new order.",
    ),
    "CONFLICTING_REVISIONS": Reason(
        "Two revisions", "If-Match and expected_revision differ.", "Send one."
    ),
    "MALFORMED_PRECONDITION": Reason(
        "If-Match malformed", 'It takes one quoted tag such as "r7".', "Copy the `ETag`."
    ),
    "PRECONDITION_FAILED": Reason(
        "If-Match does not match", "It names no state that this can be in.", "Read the `ETag`."
    ),
    "PRECONDITION_MISSING": Reason(
        "If-Match required",
        "Changes of a registration name the generation that they build on.",
        "Read the engine; send its `generation` as `If-Match`.",
    ),
    "REVISION_MISMATCH": Reason(
        "The engine has changed",
        "Its revision is not the expected one. Nothing was sent to it.",
        "Read the engine again and decide again.",
    ),
    "GENERATION_MISMATCH": Reason(
        "The registration has changed", "Someone else changed it.", "Read it, decide again."
    ),
    "SUPERSEDED": Reason(
        "Changed meanwhile", "The operation moved on while it was written.", "Try again."
    ),
    # engines, operations
    "ENGINE_NOT_FOUND": Reason("No such engine", "Not registered, or removed.", "List them."),
    "ENGINE_ALREADY_EXISTS": Reason(
        "The id is taken", "Also ids of removed engines stay taken.", "Take another id."
    ),
    "ENGINE_ADDRESS_TAKEN": Reason(
        "The address is another engine's",
        "An engine that is registered twice would take two exclusive orders at once.",
        "Use the engine that is there, or remove it first. Where two engines do share an address, "
        "say `allow_shared_address`.",
    ),
    "ENGINE_BUSY": Reason(
        "Another operation runs",
        "At most one exclusive operation is open on an engine; `operation` names it.",
        "Follow that one, or cancel it, then try again.",
    ),
    "ENGINE_UNREACHABLE": Reason(
        "Engine out of reach", "It did not answer.", "Check the engine; try again."
    ),
    "ADDRESS_NOT_ALLOWED": Reason(
        "Address not allowed",
        "Engines may be only where the setting `engine_reach` says.",
        "Have the address added to it.",
    ),
    "ENGINE_FAULT": Reason("Engine fault", "The engine's answer is unusable.", "See its logs."),
    "ENGINE_AUTH_REFUSED": Reason(
        "The engine refused the gateway",
        "The gateway's own credential was not accepted; yours is not concerned.",
        "Correct `engine_credentials`.",
    ),
    "ENGINE_REPLY_MALFORMED": Reason(
        "Engine reply malformed", "It does not follow the protocol.", "Check its release."
    ),
    "ENGINE_HAS_OPEN_OPERATION": Reason(
        "An operation is open", "The engine cannot be removed now.", "Wait for it or cancel it."
    ),
    "OPERATION_NOT_FOUND": Reason("No such operation", "Never accepted here.", "Check the id."),
    "OPERATION_ENDED": Reason("It has ended", "An end never changes.", "Read the operation."),
    "NOT_CANCELLABLE": Reason(
        "Not cancellable", "The engine does not offer to cancel this.", "Wait for its end."
    ),
    "NOT_RECONCILING": Reason(
        "The outcome is not in doubt",
        "Only of an operation that is `reconciling` can a person state the end.",
        "Wait for its end, or cancel it.",
    ),
    "SETTLED": Reason(
        "A person stated the end",
        "The outcome was not known, and somebody with `admin:settle` said that it had failed.",
        "See the audit for who and why.",
    ),
    "LEDGER_RESTORED": Reason(
        "The ledger was restored from a backup",
        "The order was open in it. Whether it was sent after the backup is not known.",
        "Look at the engine, and order it again if that is still wanted.",
    ),
    "PAYLOAD_LOST": Reason(
        "The order's tensors are gone",
        "The ledger no longer has the bytes that were to go with it. Nothing was sent.",
        "Order it again under a new key.",
    ),
    "ENGINE_FROZEN": Reason(
        "The engine is frozen",
        "For a time it takes no new orders; the detail says until when and why.",
        "Wait, or have somebody with `admin:engines` thaw it or order with `override_freeze`.",
    ),
    "STALE_PAUSE_EPOCH": Reason(
        "Not the latest pause",
        "A resume lifts the pause it names, and another one is in force.",
        "Read the engine's pause and decide whether to lift that one.",
    ),
    "STALE_RELEASE_EPOCH": Reason(
        "Not the latest release",
        "A restore undoes the release it names, and there has been another one since.",
        "Read what is released and decide whether to restore that.",
    ),
    "NOT_PAUSED": Reason("Not paused", "There is nothing to resume.", "Nothing."),
    "DRAIN_RUNNING": Reason(
        "A drain is running", "Resume does not break it.", "Cancel it or abort its requests."
    ),
    "REQUESTS_FROZEN": Reason(
        "Requests are frozen", "A pause in mode keep holds them.", "Resume or abort them first."
    ),
    "REQUESTS_IN_FLIGHT": Reason(
        "Requests are in flight",
        "The order was to be refused rather than to touch them.",
        "Wait, or order it with another drain rule.",
    ),
    "PROFILE_RUNNING": Reason(
        "A profile is running", "There is one at a time.", "Stop it, or wait for its end."
    ),
    "PROFILING_REFUSED": Reason(
        "Not while the engine is rebuilt",
        "What would be profiled is being released or reconfigured.",
        "Wait for that operation.",
    ),
    "PROFILE_NOT_RECORDING": Reason(
        "The profile has not begun",
        "It is ordered, and the engine has not taken it on yet.",
        "Cancel its operation, or ask again.",
    ),
    "PROFILE_NOT_READY": Reason(
        "The profile has no files",
        "It still records, or it failed, or it was running already under another operation.",
        "Wait for the end of its operation; `profile_id` tells which one records.",
    ),
    "ARTIFACT_NOT_FOUND": Reason(
        "No such file",
        "The profile has none of that rank, or it is no longer where the engine left it.",
        "Say `rank`; see `artifacts` of the profile.",
    ),
    "ARTIFACT_DAMAGED": Reason(
        "The file is not what the engine said of it",
        "Its size or SHA-256 differ, or its path does not lead to a plain file below the root.",
        "Look at the file on the engine's machine.",
    ),
    "ARTIFACTS_NOT_REACHABLE": Reason(
        "Files of this engine can't be fetched here",
        "The gateway has no folder in which to find them.",
        "Set `profile_roots` for the engine, or fetch `path` on the engine's machine.",
    ),
    "PROFILE_NOT_FOUND": Reason("No such profile", "Never started here.", "Check the id."),
    "LORA_NOT_FOUND": Reason("No such adapter", "It is not loaded.", "List the adapters."),
    "LORA_ALREADY_LOADED": Reason(
        "An adapter of that name is loaded",
        "It came from another path.",
        "Unload it first, or choose another name.",
    ),
    "SESSION_NOT_FOUND": Reason(
        "No such weight session",
        "No session of that name is open on the engine, or it is another caller's.",
        "See how the operation that it belonged to has ended; begin another one.",
    ),
    "SESSION_CLOSED": Reason(
        "The weight session takes nothing more",
        "It is to be committed, or is being cancelled.",
        "Follow the operation.",
    ),
    "SESSION_LEASE_EXPIRED": Reason(
        "The weight session was given up",
        "For as long as its lease nothing was heard of it. Weights are as before.",
        "Begin another one, with a longer lease if the pieces take long.",
    ),
    "CHUNK_OUT_OF_ORDER": Reason(
        "Another piece is due",
        "Pieces of a weight session come in the order of their index, each once.",
        "Send the one that is due; repeat a call under the key that it had.",
    ),
    "CHUNK_COUNT_MISMATCH": Reason(
        "Pieces are missing",
        "The commit names another number of pieces than were taken. Weights are as before.",
        "Begin another session.",
    ),
    "TOO_MANY_CHUNKS": Reason(
        "Too many pieces wait", "Those before it are still being staged.", "Wait for one of them."
    ),
    "RESOURCES_RELEASED": Reason(
        "Resources are released", "It cannot serve without them.", "Restore them first."
    ),
    "WEIGHTS_NOT_VALID": Reason(
        "Weights are not valid",
        "It cannot serve with them.",
        "Give it a full update of its weights.",
    ),
    "UNSUPPORTED_OPERATION": Reason(
        "Not offered by the engine", "See its capabilities.", "Use what it offers."
    ),
    "UNSUPPORTED_DIALECT": Reason(
        "Dialect not supported", "This release does not speak it.", "Use `openengine`."
    ),
    "QUEUE_FULL": Reason(
        "Too many orders wait",
        "As many orders are queued for this engine as may be (`max_queued_orders`).",
        "Try again later, or cancel one of them.",
    ),
    "TOO_MANY_OPERATIONS": Reason(
        "Too many operations", "The store of operations is full.", "Try again later."
    ),
    # ledger
    "LEDGER_UNAVAILABLE": Reason(
        "The ledger does not answer",
        "Of a change that was under way it is not known whether it was written.",
        f"Send an order again under the same `{_KEY}`.",
    ),
    "LEDGER_BUSY": Reason(
        "The ledger is busy",
        "No connection to its database came free in time. Nothing of the request was begun.",
        "Try again after `Retry-After`.",
    ),
    "LEDGER_NOT_WRITABLE": Reason(
        "The ledger takes no writes",
        "Its disk is full, or its database is read-only. Reads go on.",
        f"Send an order again under the same `{_KEY}`; it needs its operator.",
    ),
    "HISTORY_PRUNED": Reason(
        "Events are no longer kept", "They are older than the retention.", "Begin without a cursor."
    ),
    "LEDGER_IN_USE": Reason("The ledger is in use", "By another process.", "Stop that one."),
    "LEDGER_SCHEMA_BEHIND": Reason(
        "The ledger is of an older release", "It must be upgraded.", "`chadburn db upgrade`."
    ),
    "LEDGER_SCHEMA_AHEAD": Reason(
        "The ledger is of a newer release", "This release does not know it.", "Upgrade this."
    ),
    "LEDGER_UPGRADE_BUSY": Reason(
        "The ledger is being upgraded", "By another process.", "Wait; try again."
    ),
}
