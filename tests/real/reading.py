"""Reads one streamed completion to its end, and prints a line of JSON whenever something has
changed: whether a token has come, why it ended, what was wrong.

    python reading.py URL ENGINE REQUEST_ID MAX_TOKENS

With the standard library's client: hundreds of chunks in a second are no load for it.
"""

from __future__ import annotations

import http.client
import json
import sys
from dataclasses import asdict, dataclass


@dataclass
class Told:
    first: bool = False
    finish: str | None = None
    error: str | None = None

    def note(self, line: bytes) -> None:
        if not line.startswith(b"{"):
            return
        event = json.loads(line)
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", []):
            self.first = self.first or bool(choice.get("delta", {}).get("content"))
            self.finish = choice.get("finish_reason") or self.finish


def main(url: str, engine: str, request_id: str, max_tokens: str) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "full ahead"}], "stream": True,
        "max_tokens": int(max_tokens), "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
        if engine == "sglang":
            body["rid"] = request_id
    told, shown = Told(), Told()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as answer:
            for line in answer:
                told.note(line.removeprefix(b"data: ").strip())
                if told != shown:
                    print(json.dumps(asdict(told)), flush=True)
                    shown = Told(**asdict(told))
    except (OSError, http.client.HTTPException) as error:
        told.error = repr(error)
        print(json.dumps(asdict(told)), flush=True)
    finally:
        connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
