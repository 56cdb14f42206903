"""`EngineLoop`: the one thread that works for all requests of a server."""

from __future__ import annotations

import logging
import threading

from starquill.engine.engine import Engine

log = logging.getLogger("starquill")


class EngineLoop:
    """Steps an engine in a thread of its own until it is closed; a context manager."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> EngineLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still worked on."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End after the step that runs now; requests that have not ended get no more deltas."""
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self.engine.step():
                    self.engine.wait(0.1)
        except Exception:
            log.exception("the engine's thread ended")
            raise
