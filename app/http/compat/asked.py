"""What was asked, read as vLLM reads it: parameters out of the query, a body only where it looks at
one. Pure.

It ignores what stands elsewhere. Here a body that asks for something else than the query does is
refused: `{"mode": "keep"}` in the body of a pause would end every request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from app.http.compat.refusals import BadBody, Invalid

_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})
_NOTHING = object()
_FORM = "application/x-www-form-urlencoded"
BIGGEST = (1 << 31) - 1
"""As much as any number goes that is sent on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`query`: in its order, names repeated. `content_type`: lower case, without parameters."""

    query: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    content_type: str = ""

    def text(self, name: str) -> str | None:
        """The last one given; None: none is."""
        found = self.texts(name)
        return found[-1] if found else None

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(value for given, value in self.query if given == name)

    def only(self, *names: str) -> None:
        """Of endpoints where a word that is passed over leaves a default that does more than was
        meant: `mod=wait` would end every request. Raises Invalid for any other parameter."""
        if any(given not in names for given, _ in self.query):
            said = f"Extra inputs are not permitted: this endpoint takes {_either(names, 'and')}"
            raise Invalid("query", "extra_forbidden", said)

    def word(self, name: str, words: tuple[str, ...], default: str) -> str:
        """Raises Invalid."""
        given = self.text(name)
        if given is None:
            return default
        if given not in words:
            raise Invalid(f"query.{name}", "enum", f"Input should be {_either(words)}")
        return given

    def flag(self, name: str, *, default: bool) -> bool:
        """Raises Invalid."""
        given = self.text(name)
        if given is None:
            return default
        if given.lower() not in _TRUE | _FALSE:
            said = "Input should be a valid boolean, unable to interpret input"
            raise Invalid(f"query.{name}", "bool_parsing", said)
        return given.lower() in _TRUE

    def number(self, name: str, *, default: int, least: int, most: int) -> int:
        """Raises Invalid."""
        given = self.text(name)
        if given is None:
            return default
        place = f"query.{name}"
        try:
            number = int(given)
        except ValueError:
            said = "Input should be a valid integer, unable to parse string as an integer"
            raise Invalid(place, "int_parsing", said) from None
        if number < least:
            said = f"Input should be greater than or equal to {least}"
            raise Invalid(place, "greater_than_equal", said)
        if number > most:
            raise Invalid(place, "less_than_equal", f"Input should be less than or equal to {most}")
        return number

    def agrees_with(self, effective: Mapping[str, Any]) -> None:
        """A body where vLLM looks at the query alone: it may repeat what takes effect. Raises
        BadBody for one that asks for something else, which vLLM would not even see."""
        said = self._ignored()
        for name, value in effective.items():
            given = said.get(name, _NOTHING)
            if given not in (_NOTHING, value, _in_form(value)):
                raise BadBody(
                    f"{name} is taken from the query of this endpoint, not from its body, and the "
                    "body asks for something else. Nothing was done."
                )

    def _ignored(self) -> Mapping[str, Any]:
        """Also what `curl -d mode=keep` sends, as texts."""
        try:
            found = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            if self.content_type != _FORM:
                return {}
            fields = parse_qsl(self.body.decode("utf-8", "replace"))
            return {name: value.lower() for name, value in fields}
        return found if isinstance(found, dict) else {}

    def raw_object(self) -> Mapping[str, Any]:
        """For endpoints that parse the body themselves, of whatever media type. Raises BadBody."""
        try:
            found = _parsed(self.body)
        except (ValueError, RecursionError):
            raise BadBody("Invalid JSON format") from None
        if not isinstance(found, dict):
            raise BadBody("Request body must be a JSON object")
        return found

    def json_only(self) -> None:
        """Raises Invalid for another media type, or none."""
        if self.content_type != "application/json":
            said = "Unsupported Media Type: Only 'application/json' is allowed"
            raise Invalid("", "media_type", said)

    def model(self, *, optional: bool = False) -> Mapping[str, Any]:
        """For endpoints that describe their body. Raises Invalid."""
        if not self.body:
            if optional:
                return {}
            raise Invalid("body", "missing", "Field required")
        if self.content_type not in ("application/json", ""):
            said = "Input should be a valid dictionary or object to extract fields from"
            raise Invalid("body", "model_attributes_type", said)
        try:
            found = _parsed(self.body)
        except (ValueError, RecursionError):
            raise Invalid("body", "json_invalid", "JSON decode error") from None
        if found is None and optional:
            return {}
        if not isinstance(found, dict):
            said = "Input should be a valid dictionary or object to extract fields from"
            raise Invalid("body", "model_attributes_type", said)
        return found


def field(
    body: Mapping[str, Any], name: str, kind: type, *, default: Any = _NOTHING, within: str = "body"
) -> Any:
    """A field of that very type: a bool is no number, and nothing is converted. Raises Invalid."""
    place = f"{within}.{name}"
    value = body.get(name)
    if value is None:
        if default is _NOTHING:
            raise Invalid(place, "missing", "Field required")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Invalid(
            place, f"{_WORDS[kind][0]}_type", f"Input should be a valid {_WORDS[kind][1]}"
        )
    if isinstance(value, int) and abs(value) > BIGGEST:
        raise Invalid(place, "int_parsing_size", "Unable to parse input string as an integer")
    return value


_WORDS: Mapping[type, tuple[str, str]] = {
    str: ("string", "string"),
    int: ("int", "integer"),
    bool: ("bool", "boolean"),
    dict: ("dict", "dictionary"),
    list: ("list", "list"),
}


def _in_form(value: Any) -> str:
    """As a form says it."""
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(body: bytes) -> Any:
    """Strict where engines, databases and wires differ. Raises ValueError, RecursionError."""
    found = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_once)
    # Half a character has no bytes, and NUL has no place in every database.
    if b"\\u0000" in json.dumps(found, ensure_ascii=False).encode("utf-8"):
        raise ValueError("NUL")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two lists of requests to be ended, the second may be the empty one, which means all."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _either(words: tuple[str, ...], last_but: str = "or") -> str:
    *first, last = [f"'{word}'" for word in words]
    return f"{', '.join(first)} {last_but} {last}" if first else last
