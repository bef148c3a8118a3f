"""What engines give as reasons: those on the administration kit, the sidecars, and vLLM's own
service. Any other engine may make up more."""

from __future__ import annotations

from collections.abc import Mapping

from app.http.reason import Reason

_AGAIN = "Read the engine, and order it again."
_LOOK = "Look at the engine and its log; order it again when it is as it should be."
_FULL_UPDATE = "Give it a full update of its weights; it stays paused until then."
_NEW_LIFE = "Start the engine anew."
_OTHER_WAY = "Use what its capabilities name."

OF_ENGINES: Mapping[str, Reason] = {
    # the engine itself
    "ADMIN_LISTENER_ONLY": Reason(
        "Only at the engine's admin listener",
        "Administration is not served where inference is.",
        "Register the address of its admin listener.",
    ),
    "WRONG_AUDIENCE": Reason(
        "The engine expects another audience",
        "The gateway's token was made out to another service.",
        "Correct the `audience` in `engine_credentials`.",
    ),
    "OUT_OF_SERVICE": Reason(
        "The engine is out of service",
        "Its ranks are lost, or not known to agree. It takes no requests.",
        "See its `ranks`; a full update of its weights or a new start brings it back.",
    ),
    "ENGINE_STOPPING": Reason("The engine is stopping", "It takes no new orders.", "Wait for it."),
    "ENGINE_DIED": Reason(
        "The engine ended under the order", "Nobody can say what it had done.", _LOOK
    ),
    "ENGINE_DEAD": Reason(
        "The engine is dead behind its front end",
        "The front end answers, and nothing behind it does. It does not come back by itself.",
        _NEW_LIFE,
    ),
    "ENGINE_ERROR": Reason("The engine failed", "It answered with an error of its own.", _LOOK),
    "ENGINE_REFUSED": Reason(
        "The engine refused", "It answered the order with a refusal of its own.", _LOOK
    ),
    "ENGINE_RESTARTED": Reason(
        "The engine was started anew",
        "The order was for the process before. What that one held is gone.",
        _AGAIN,
    ),
    "ENGINE_NOT_ANSWERING": Reason(
        "The engine does not answer", "It is there, and said nothing in time.", _LOOK
    ),
    "SCHEDULER_SILENT": Reason(
        "The engine's scheduler does not answer",
        "Its front end does. Nothing was ordered of it.",
        "Wait; if it stays so, start the engine anew.",
    ),
    "WRONG_ANSWER": Reason(
        "The engine's answer is not one", "It does not have the form that it should.", _LOOK
    ),
    "CANNOT_SERVE": Reason(
        "The engine cannot generate", "Its own probe did not come through.", _LOOK
    ),
    "NO_TOKEN": Reason("A generation came to no token", "The probe got no answer.", _LOOK),
    "WORKER_BUSY": Reason(
        "The worker is still at an earlier order", "It takes one at a time.", "Try again later."
    ),
    "NOTES_UNWRITABLE": Reason(
        "The sidecar cannot write its notes",
        "It orders nothing that it could forget.",
        "Make room in its data directory, or make it writable.",
    ),
    "STORE_UNAVAILABLE": Reason(
        "The engine's store does not answer",
        "It takes nothing on that it could not remember.",
        "Make room in its data directory, or make it writable.",
    ),
    "ORDER_TOO_LARGE": Reason(
        "The order is too large for one message",
        "The engine's or the gateway's limit is below its size. Nothing was sent.",
        "Send weights in a session, or from disk.",
    ),
    "UNAUTHENTICATED": Reason(
        "The engine refused the gateway",
        "The gateway's own credential was not accepted; yours is not concerned.",
        "Correct `engine_credentials`.",
    ),
    # what became of an order
    "CANCELLED": Reason("Cancelled", "It was called off before it took effect.", "Nothing."),
    "NOT_UNDONE": Reason(
        "It could not be taken back",
        "The order failed half-way, and so did the way back. `effect` and the ranks say what is "
        "left.",
        _LOOK,
    ),
    "ROLLBACK_FAILED": Reason(
        "It could not be taken back",
        "A rank did not return to what it was before.",
        "See the ranks; a full update of its weights or a new start brings it back.",
    ),
    "NOT_CARRIED_OUT": Reason(
        "The engine did not do it", "It said yes, and does not show what was ordered.", _LOOK
    ),
    "NOT_CONFIRMED": Reason(
        "It does not show",
        "The engine said yes, and what is read back says something else.",
        _LOOK,
    ),
    "MEMBERS_DIFFER": Reason(
        "The members of the engine differ",
        "Some show what was ordered and some do not.",
        "See the ranks; order it again, or start those anew that differ.",
    ),
    "RANK_LOST": Reason(
        "A rank was lost", "It ended or stopped answering; `ranks` names it.", _LOOK
    ),
    "RANK_LATE": Reason(
        "A rank was too late", "Others had failed, and it did not acknowledge in time.", _LOOK
    ),
    "RANK_REJECTED": Reason(
        "A rank refused what it was given",
        "`ranks` and the message say which one and what. Nothing was changed.",
        "Correct what is sent.",
    ),
    "RANKS_REPLACED": Reason(
        "The ranks were replaced meanwhile", "What they recorded went with them.", _AGAIN
    ),
    "RANKS_NOT_STARTED": Reason(
        "The new ranks did not start", "The engine went back to its old shape.", _LOOK
    ),
    # pauses and requests
    "DRAINING": Reason("The engine drains", "It takes no new requests.", "Wait, or resume it."),
    "DRAIN_UNCONFIRMED": Reason(
        "Whether it has drained is not known",
        "A pause that was to let requests end is in force, and its end was not seen.",
        "Wait until nothing is in flight, or pause it with abort.",
    ),
    "PAUSE_NOT_SEEN": Reason(
        "The pause does not show", "Somebody else may have resumed the engine.", _AGAIN
    ),
    "RESUME_NOT_SEEN": Reason(
        "The engine did not open",
        "Somebody else may have paused it, or it does not generate.",
        _AGAIN,
    ),
    "REQUESTS_RUNNING": Reason(
        "Requests still run", "They would lose what they run on.", "Pause it with drain or abort."
    ),
    "REQUESTS_NOT_ENDED": Reason(
        "Some requests could not be ended", "The message says which.", "Order it again."
    ),
    "REQUEST_NOT_FOUND": Reason("No such request", "It is not in flight here.", "Nothing."),
    "DUPLICATE_REQUEST": Reason(
        "A request of that id runs", "Ids are of one request at a time.", "Take another id."
    ),
    "ABORT_ALL_NOT_OFFERED": Reason(
        "Not all at once",
        "This engine ends requests by their ids alone, and cannot tell which it has.",
        "Name the requests, or pause it with abort.",
    ),
    "ADMISSION_LEFT_OPEN": Reason(
        "The engine may have been left open",
        "A restore opened it, and it could not be paused again.",
        "Pause it.",
    ),
    "CACHE_IN_USE": Reason(
        "The cache is in use", "Requests in flight hold it.", "Pause it with drain or abort first."
    ),
    # memory
    "ALREADY_RELEASED": Reason(
        "Something is released already",
        "The engine releases once; what is missing goes together or not at all.",
        "Restore first, then release all of it together.",
    ),
    "NOT_RELEASED": Reason("It is not released", "There is nothing to restore.", "Nothing."),
    "ASLEEP_ALREADY": Reason(
        "Somebody else has put it to sleep",
        "Without an order of the gateway's, so that its epoch is not known.",
        "Wake it in the same way, or restore it by the engine's latest release.",
    ),
    "SLEEP_NOT_SEEN": Reason("The sleep does not show", "The engine shows another state.", _LOOK),
    "SLEEP_STATE_UNKNOWN": Reason(
        "Whether it sleeps is not known",
        "Waking what is awake, or working on what sleeps, would end the engine.",
        _NEW_LIFE,
    ),
    "RELEASE_UNCONFIRMED": Reason(
        "The release does not show", "Some of it may be released.", _LOOK
    ),
    "RESTORE_UNCONFIRMED": Reason(
        "The restore does not show", "Some of it may still be released.", _LOOK
    ),
    "WEIGHTS_FIRST": Reason(
        "Weights come first",
        "The engine opens itself with the last of its memory, and has no valid weights yet.",
        "Restore the weights, update them, then restore the KV cache.",
    ),
    "MEMORY_NOT_KNOWN": Reason(
        "What is released is not known",
        "Asking for the wrong part ends this engine, so nothing was asked.",
        _NEW_LIFE,
    ),
    "MEMORY_MOVING": Reason(
        "Its memory is on the move", "Somebody else has it parked or woken.", "Try again later."
    ),
    "MEMORY_FAILED": Reason(
        "A memory order failed half-way", "The engine cannot say what it holds.", _NEW_LIFE
    ),
    # weights
    "SOURCE_REFUSED": Reason(
        "The source does not fit",
        "A path, name, shape, dtype or checksum is not what this model takes; the message names "
        "it. Nothing was changed.",
        "Correct the checkpoint or the order.",
    ),
    "SOURCE_UNREADABLE": Reason(
        "The source cannot be read",
        "A file is missing, cut short or unreadable.",
        "Write it again.",
    ),
    "WEIGHTS_UNFIT": Reason(
        "The weights do not fit the model",
        "Names, shapes or dtypes differ, or a file is damaged. Nothing was sent to the engine.",
        "Correct the checkpoint.",
    ),
    "PAYLOAD_UNFIT": Reason(
        "The payload is not one that the engine takes",
        "It has another number of parts than the engine has ranks, is cut off, or names a way to "
        "load it that the engine does not know. It was not sent.",
        "Send one part for each rank, as the engine's serializer has written them.",
    ),
    "PAYLOAD_ALREADY_SENT": Reason(
        "The payload was sent before",
        "The engine was sent this very payload already, and what it names may be gone after one "
        "reading. It was not sent again.",
        "Serialize the weights anew, all of the update.",
    ),
    "WEIGHTS_INCONSISTENT": Reason(
        "Weights are neither the old nor the new ones",
        "An update broke off, or ranks differ.",
        _FULL_UPDATE,
    ),
    "UPDATE_INCOMPLETE": Reason(
        "The update did not come to its end", "Some of it may have been written.", _FULL_UPDATE
    ),
    "UPDATE_BROKEN_OFF": Reason(
        "The update was broken off", "Some of it may have been written.", _FULL_UPDATE
    ),
    "UPDATE_OPEN": Reason(
        "Somebody else has begun an update", "The engine has one at a time.", "Have it ended."
    ),
    "WEIGHT_UPDATE_OPEN": Reason(
        "An update has begun", "The engine has one at a time.", "Finish it first."
    ),
    "NO_WEIGHT_UPDATE": Reason("No update has begun", "There is nothing to go on with.", "Begin."),
    "VERSION_NOT_SEEN": Reason(
        "The new version does not show",
        "The engine tells another version than was ordered, or none.",
        _FULL_UPDATE,
    ),
    "SESSION_ABORTED": Reason(
        "The weight session was called off", "By whoever began it.", "Begin another one."
    ),
    "ONE_COMPONENT": Reason(
        "Target and draft one by one", "This engine updates one in an order.", "Send two orders."
    ),
    "PACKED_NOT_OFFERED": Reason(
        "No packed tensors", "They come one by one here.", "Send each tensor by itself."
    ),
    "TRANSFER_NOT_OFFERED": Reason(
        "Not this way of transfer", "The message says what is missing.", _OTHER_WAY
    ),
    "TRANSFER_FAILED": Reason(
        "The transfer failed",
        "The trainer did not come, went away, or sent something else; the message names the "
        "tensor. Weights are as before.",
        "See that the trainer sends what the order names; order it again.",
    ),
    "TRAINER_NOT_THERE": Reason(
        "The trainer was not there",
        "Nobody listened at the rendezvous, so the engine was not sent there.",
        "Start the trainer's side first.",
    ),
    "RENDEZVOUS_NOT_ALLOWED": Reason(
        "The rendezvous is not allowed",
        "The engine joins groups only where its configuration says.",
        "Use an allowed address, or have it added.",
    ),
    "GROUP_BEING_JOINED": Reason(
        "A group is being joined", "One at a time.", "Wait for it, then ask again."
    ),
    "GROUP_NOT_COMPLETE": Reason(
        "The group did not become complete",
        "The engine may wait for the other members in the midst of its work.",
        "Start all members; else start the engine anew.",
    ),
    "NOT_CONFIGURED": Reason(
        "Not configured", "The engine was started without it.", "Start it with it, or leave it out."
    ),
    "MODEL_NOT_SEEN": Reason(
        "The model's files are not seen",
        "The sidecar compares new weights with them, and cannot find them.",
        "Give it `--model-path`.",
    ),
    "MODEL_NOT_FOUND": Reason("No such model", "The engine does not serve it.", "See its models."),
    "PATH_NOT_ALLOWED": Reason(
        "The path is not allowed",
        "It does not lead below one of the engine's roots, or holds a pattern.",
        "Put the files below an allowed root, or have it added.",
    ),
    # adapters
    "ADAPTER_REFUSED": Reason(
        "The adapter does not fit", "The message says what. Nothing was changed.", "Correct it."
    ),
    "LORA_UNFIT": Reason(
        "The adapter does not fit the model", "Nothing was sent to the engine.", "Correct it."
    ),
    "LORA_NOT_SEEN": Reason("The adapter does not show", "The engine does not list it.", _AGAIN),
    "UNLOAD_NOT_SEEN": Reason("The adapter still shows", "The engine still lists it.", _AGAIN),
    "LORA_NAME_TAKEN": Reason("The name is taken", "By a model or an adapter.", "Choose another."),
    "LORA_NAME_NOT_OFFERED": Reason(
        "Not as a name of an adapter", "The message says which sign it is.", "Choose another."
    ),
    "LORA_ID_TAKEN": Reason("The number is taken", "By another adapter.", "Leave it out."),
    "LORA_ID_NOT_OFFERED": Reason(
        "The engine numbers its adapters", "None can be chosen.", "Leave `lora_id` out."
    ),
    "LORA_IN_USE": Reason(
        "The adapter is in use", "Requests run under it.", "Wait, or abort them first."
    ),
    "LORA_LIMIT": Reason("No room for an adapter", "As many are loaded as may.", "Unload one."),
    "LORA_SLOTS_FULL": Reason("No room for an adapter", "All slots are taken.", "Unload one."),
    # what vLLM was started without
    "SLEEP_MODE_OFF": Reason(
        "vLLM was started without sleep",
        "It keeps its memory.",
        "Start it with `--enable-sleep-mode`.",
    ),
    "WEIGHT_TRANSFER_OFF": Reason(
        "vLLM was started without weight transfer",
        "It takes no weights while it runs.",
        "Start it with `--weight-transfer-config`.",
    ),
    "NO_DRAFT_MODEL": Reason(
        "There is no draft model", "So its weights cannot be updated.", "Update the target alone."
    ),
    "ENGINE_NOT_MANAGED": Reason(
        "The front end did not start its engine",
        "So it does not end it either.",
        "End the engine where it was started.",
    ),
    # profiles, shape
    "NO_ARTIFACT": Reason(
        "The engine wrote no trace", "Or not to its end.", "See its log; profile it again."
    ),
    "PROFILE_FAILED": Reason("The profile failed", "The profiler of a rank did.", _LOOK),
    "PROFILE_NOT_WRITTEN": Reason(
        "The profile was not written", "A rank's file is missing or not whole.", _LOOK
    ),
    "PROFILE_FOLDER_UNWRITABLE": Reason(
        "The profile's folder is not writable",
        "This engine ends when it cannot write there, so it was not asked.",
        "Make it writable for the engine.",
    ),
    "PROFILE_OPTION_NOT_OFFERED": Reason(
        "Not this option of a profile", "The engine does not have it.", _OTHER_WAY
    ),
    "SHAPE_NOT_POSSIBLE": Reason(
        "Not this shape", "The model cannot be divided so.", "Choose another size."
    ),
    "ONE_CHANGE": Reason("One change at a time", "The engine makes one.", "Send two orders."),
    "ROLE_NOT_OFFERED": Reason("Not this role", "The engine does not have it.", _OTHER_WAY),
    "ROLE_NOT_SEEN": Reason("The new role does not show", "The engine tells another.", _LOOK),
    "ROLE_MISMATCH": Reason(
        "Not for an engine of this role",
        "Prefill and decode take different requests.",
        "Send it to an engine of the other role.",
    ),
    "SCALE_NOT_SEEN": Reason(
        "The new number of ranks does not show", "The engine has another.", _LOOK
    ),
    "SCALE_DOWN_NOT_OFFERED": Reason(
        "Ranks are not taken away", "They can only be added here.", "Start it with fewer."
    ),
    "KV_SESSION_NOT_FOUND": Reason(
        "No such KV session", "It was taken already, or given up.", "Prefill again."
    ),
    "KV_ADDRESS_UNAVAILABLE": Reason(
        "No address for KV hand-off", "The engine could not listen there.", "See its log."
    ),
    "UNSUPPORTED_FEATURE": Reason(
        "A feature that the engine does not have", "The message names it.", "Leave it out."
    ),
}
