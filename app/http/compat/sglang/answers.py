"""What endpoints say when all went well: bodies that SGLang alone has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from app.http.compat.sglang.weights import Updated
from app.http.compat.sglang.works import Scaled, Switched


def null(_: Any) -> Response:
    return JSONResponse(None)


def flushed(_: None) -> Response:
    return Response("Cache flushed.\n")  # without a media type, as there


def updated(found: Updated) -> Response:
    message = f"The weights are updated. Their version is {found.version}."
    return JSONResponse(
        {"success": True, "message": message, "num_paused_requests": found.requests_held}
    )


def versioned(version: str) -> Response:
    message = f"The version of the weights is {version}"
    return JSONResponse({"success": True, "message": message, "new_version": version})


def adapters(loaded: Mapping[str, str]) -> Response:
    return JSONResponse(
        {
            "rid": None,
            "http_worker_ipc": None,
            "success": True,
            "error_message": "",
            "loaded_adapters": dict(loaded),
        }
    )


def switched(found: Switched) -> Response:
    return JSONResponse(
        {
            "rid": None,
            "http_worker_ipc": None,
            "success": True,
            "message": "The role is switched.",
            "old_role": found.old_role,
            "new_role": found.new_role,
            "safe_to_restore": True,
        }
    )


def scaled(found: Scaled) -> Response:
    message = f"Scaled from {found.old_size} to {found.new_size}"
    sizes = {"old_ep_size": found.old_size, "new_ep_size": found.new_size}
    return JSONResponse({"message": message, **sizes})
