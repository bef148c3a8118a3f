"""Text to token ids and back, and text that grows with a token stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from app.reference_engine.errors import CheckpointFileInvalid, CheckpointFileMissing

# What a decoder shows for bytes that are no character, or not one yet.
REPLACEMENT = "\ufffd"
# Enough tokens of context for decoders that treat the beginning of a text specially.
_CONTEXT_TOKENS = 6
# A character is at most four bytes; a longer tail of replacements is not going to become text.
_LONGEST_WAIT_TOKENS = 16


class Tokenizer:
    """A checkpoint's ``tokenizer.json``. Thread-safe as far as reading goes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._token_texts: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self._longest_token: int | None = None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointFileMissing(path)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises bare Exception for all it can not read
            raise CheckpointFileInvalid(path, str(error)) from error

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number; added tokens count."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def longest_text(self, token_count: int) -> int:
        """No text of more characters than this fits into that many tokens."""
        if self._longest_token is None:
            self._longest_token = max(map(len, self._inner.get_vocab(with_added_tokens=True)))
        return token_count * self._longest_token

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids with the special tokens that the tokenizer itself puts around a prompt."""
        return tuple(self._inner.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; U+FFFD stands for bytes that are no character."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """A token by itself; special tokens by name."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._inner.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def decoded_length(self, token_ids: Sequence[int]) -> int:
        """Characters of what :meth:`decode` gives. Asked for nearly every token, by itself."""
        if len(token_ids) != 1:
            return len(self.decode(token_ids))
        (token_id,) = token_ids
        length = self._lengths.get(token_id)
        if length is None:
            length = self._lengths[token_id] = len(self.decode(token_ids))
        return length


class Detokenizer:
    """The text of one growing output, given out in pieces that are never half a character.

    Decodes only from the last point at which the text was whole: the cost of a token does not grow
    with the output, and what came before still decides about spaces.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._fresh: list[int] = []
        self._shown = len(tokenizer.decode(self._context).rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """New text; empty while a character is incomplete."""
        self._fresh.append(token_id)
        text = self._tokenizer.decode(self._context + self._fresh)
        if text.endswith(REPLACEMENT) and len(self._fresh) < _LONGEST_WAIT_TOKENS:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """What is left, with U+FFFD for a character that never became complete."""
        return self._settle(self._tokenizer.decode(self._context + self._fresh))

    def _settle(self, text: str) -> str:
        new = text[self._shown :]
        if self._fresh:
            self._context, self._fresh = self._fresh, []
        self._shown = self._tokenizer.decoded_length(self._context)
        return new
