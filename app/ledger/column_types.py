"""Column types that mean the same on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, String, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine

BIG = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits. SQLite numbers rows by itself only in a column of the type INTEGER."""

JSON_DOCUMENT = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class UtcTime(TypeDecorator[datetime]):
    """An aware moment in, the same moment in UTC out, to the microsecond.

    TIMESTAMP WITH TIME ZONE on PostgreSQL; on SQLite, which has no type for it, text of fixed
    width, so that it sorts and compares as time does.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return String(32) if dialect.name == "sqlite" else DateTime(timezone=True)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("times in the ledger are timezone-aware")
        moment = value.astimezone(UTC)
        return moment.isoformat(timespec="microseconds") if dialect.name == "sqlite" else moment

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment = datetime.fromisoformat(value) if dialect.name == "sqlite" else value
        return moment.astimezone(UTC)


class Words(TypeDecorator[str]):
    """Text of any length that compares byte by byte on both databases.

    The texts come from callers and engines. What PostgreSQL cannot keep, the character NUL, and
    what UTF-8 cannot spell, half a surrogate pair, becomes U+FFFD on its way in: an engine's odd
    error message must not be what keeps an operation from ever ending.
    """

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return Text(collation="C") if dialect.name == "postgresql" else Text()

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def storable(text: str) -> str:
    """The text without what either database refuses."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        # By way of UTF-16, which joins the halves that belong together.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
