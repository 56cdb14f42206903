"""From token bytes to text that may be shown: whole characters, and no stop strings."""

from __future__ import annotations

import codecs


class TextStream:
    """Turns bytes into text, withholding what cannot be shown yet.

    Half a UTF-8 character waits for its other half. The longest tail that may still become a
    stop string waits too. Bytes that can be no UTF-8 become U+FFFD. The result does not depend
    on how the bytes were cut into tokens.
    """

    def __init__(self, stop: tuple[str, ...] = (), skip: int = 0, own_space: bool = False) -> None:
        """`skip` is the number of leading bytes that belong to the prompt, not to the output.

        `own_space` says that a space at the beginning is the tokenizer's, and no text.
        """
        self._stop = tuple(s for s in stop if s)
        self._skip = skip
        self._own_space = own_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Text that `data` makes certain. Sets `stopped` when a stop string was completed."""
        if self._own_space and data:
            self._own_space = False
            data = data.removeprefix(b" ")
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        text = self._held + self._decoder.decode(data[skipped:])
        ends = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            # The stop that is complete first wins, whatever the chunks were.
            return text[: min(ends)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0

    def finish(self) -> str:
        """What was withheld, at the end. A character that was never completed is dropped."""
        held, self._held = self._held, ""
        return held
