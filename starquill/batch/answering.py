"""Answers to lines, each by the route that would answer it over HTTP, many at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from starlette.types import ASGIApp

from starquill.batch.lines import Line
from starquill.engine.engine import Engine
from starquill.engine.loop import EngineLoop
from starquill.errors import BadRequestError, printable
from starquill.server.app import create_app
from starquill.server.calling import Call, ask
from starquill.server.options import ServerOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
INPUTS = ("prompt", "prefix", "messages")
QUEUE_BY_SLOTS = 3  # what an engine's queue must be
MOST_HELD = 16  # times as many lines as run may wait, answered, for one before them

Json = dict[str, Any]
Make = Callable[[], tuple[Engine, ServerOptions]]


@dataclass(frozen=True)
class Asked:
    """What a line says: an id of its own, and a route's body."""

    id: Any
    path: str
    body: Json


def read_line(line: Line, settings: Mapping[str, Any]) -> Asked:
    """Raises BadRequestError. `settings` are fields that a line may leave out."""
    try:
        said = json.loads(line.text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError
        raise BadRequestError(f"the line is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise BadRequestError(f"the line is a {type(said).__name__} (expected a JSON object)")
    given = [name for name in INPUTS if said.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise BadRequestError(f"the line has {found} (expected one of {', '.join(INPUTS)})")
    fields = {**settings, **{key: value for key, value in said.items() if value is not None}}
    if any(fields.get(name, 1) != 1 for name in ("n", "best_of")):
        raise BadRequestError("n and best_of must be 1: a line has one answer; write it again")
    own_id = fields.pop("id", None)
    fields.pop("stream", None)
    if given == ["messages"]:
        return Asked(own_id, CHAT, fields)
    if given == ["prefix"]:
        fields["prompt"] = fields.pop("prefix")
        fields.setdefault("suffix", "")
    if not isinstance(fields["prompt"], str | list) or _is_several(fields["prompt"]):
        raise BadRequestError("prompt must be one text, or one list of token ids")
    return Asked(own_id, COMPLETIONS, fields)


def _is_several(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt)


class Answering:
    """An engine's application and thread; a context manager. `answers` is the way in."""

    def __init__(self, make: Make, settings: Mapping[str, Any]) -> None:
        engine, options = make()
        # As many wait as run, so that a slot which gets free is taken at the next step. The engine
        # counts those that end in a step until its end, so it must have room for them too.
        self.at_once = engine.options.slots * 2
        assert engine.options.queue >= engine.options.slots * QUEUE_BY_SLOTS, "none is turned away"
        self._settings = settings
        self._loop = EngineLoop(engine)
        self._app: ASGIApp = create_app(engine, options, lambda: self._loop.is_alive)

    def __enter__(self) -> Answering:
        self._loop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    async def answer(self, line: Line) -> Json:
        """What a line is answered with: a text, or an error."""
        head: Json = {"id": None, "index": line.index}
        try:
            asked = read_line(line, self._settings)
        except BadRequestError as error:
            return {**head, "error": str(error)}
        head["id"] = asked.id
        call = Call.post(asked.path, asked.body)
        status, said = await ask(self._app, call, lambda: self._loop.is_alive)
        if status != 200:
            return {**head, "error": printable(said["error"]["message"])}
        choice = said["choices"][0]
        text = choice["message"]["content"] if asked.path == CHAT else choice["text"]
        answer = {**head, "text": text, "finish_reason": choice["finish_reason"]}
        if choice["logprobs"] is not None:
            answer["logprobs"] = choice["logprobs"]
        return {**answer, "usage": said["usage"]}

    async def answers(
        self, lines: Iterable[Line], *, ordered: bool = False
    ) -> AsyncIterator[tuple[Line, Json]]:
        """Each line with its answer, as they get ready; with `ordered` as they come."""
        tasks: dict[asyncio.Task[Json], Line] = {}  # in the order of lines
        upcoming, more = iter(lines), True
        try:
            while tasks or more:
                running = [task for task in tasks if not task.done()]
                room = min(self.at_once - len(running), MOST_HELD * self.at_once - len(tasks))
                new = list(islice(upcoming, room))
                more = more and len(new) == room
                started = {asyncio.ensure_future(self.answer(line)): line for line in new}
                tasks |= started
                if running or started:
                    await asyncio.wait([*running, *started], return_when=asyncio.FIRST_COMPLETED)
                ready = takewhile(_is_done, tasks) if ordered else filter(_is_done, tasks)
                for task in list(ready):
                    yield tasks.pop(task), task.result()
        finally:
            for task in tasks:
                task.cancel()


def _is_done(task: asyncio.Task[Json]) -> bool:
    return task.done()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
