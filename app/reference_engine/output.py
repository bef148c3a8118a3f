"""When a request's output ends, and what of it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.reference_engine.messages import FinishReason, StopKind, StopMatch, Stopping
from app.reference_engine.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one sampled token adds. ``show_token`` False: it was a stop that is not to be seen."""

    text: str
    show_token: bool = True
    reason: FinishReason | None = None
    stop: StopMatch | None = None


class Output:
    """Follows one output token by token.

    Text that could be the beginning of a stop text is held back until it is clear, so a stop text
    never reaches a caller in part.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stopping: Stopping,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._stopping = stopping
        self._eos = () if stopping.ignore_eos else eos_token_ids
        self._text = Detokenizer(tokenizer, prompt_ids)
        self._held = ""
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens sampled so far, stops included."""
        return self._length

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that must not come next, because the output would end before its minimum."""
        if self._length >= self._stopping.min_tokens:
            return ()
        return self._eos + self._stopping.stop_token_ids

    def push(self, token_id: int) -> Step:
        """Take the next token. After a step with a ``reason`` nothing may follow."""
        self._length += 1
        stopping = self._stopping
        if token_id in self._eos:
            stop = StopMatch(StopKind.EOS, token_id=token_id)
            return self._end(FinishReason.STOP, stop=stop, show_token=False)
        stop_token = token_id in stopping.stop_token_ids
        if stop_token and not stopping.include_stop_in_output:
            stop = StopMatch(StopKind.TOKEN, token_id=token_id)
            return self._end(FinishReason.STOP, stop=stop, show_token=False)
        self._held += self._text.push(token_id)
        if stop_token or self._length >= stopping.max_tokens:
            self._held += self._text.flush()
        if (matched := self._stop_text()) is not None:
            at, text = matched
            shown = self._held[: at + len(text) if stopping.include_stop_in_output else at]
            stop = StopMatch(StopKind.TEXT, text=text)
            return Step(text=shown, reason=FinishReason.STOP, stop=stop)
        if stop_token:
            return self._end(FinishReason.STOP, stop=StopMatch(StopKind.TOKEN, token_id=token_id))
        if self._length >= stopping.max_tokens:
            return self._end(FinishReason.LENGTH)
        return Step(text=self._release(self._possible_stop()))

    def cancel(self) -> str:
        """The text still held back, for an output that is ended from outside."""
        self._held += self._text.flush()
        return self._release(0)

    def _end(
        self, reason: FinishReason, *, stop: StopMatch | None = None, show_token: bool = True
    ) -> Step:
        return Step(text=self.cancel(), show_token=show_token, reason=reason, stop=stop)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _stop_text(self) -> tuple[int, str] | None:
        """Place and text of the first stop text in what is held, the longest if several begin
        there."""
        if self._length <= self._stopping.min_tokens:
            return None
        found = [
            (at, -len(text), text)
            for text in self._stopping.stop_texts
            if (at := self._held.find(text)) >= 0
        ]
        if not found:
            return None
        at, _, text = min(found)
        return at, text

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins some stop text."""
        if self._length <= self._stopping.min_tokens:
            return 0
        longest = 0
        for text in self._stopping.stop_texts:
            for length in range(min(len(text) - 1, len(self._held)), longest, -1):
                if self._held.endswith(text[:length]):
                    longest = length
                    break
        return longest
