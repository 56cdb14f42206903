"""What may be written, as a field of a body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from starquill.engine.grammar import (
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, BusyError, StarquillError
from starquill.server.errors import ApiError
from starquill.server.schema import FAIL_FAST, Body
from starquill.types import GenerateRequest


class GuidedBody(Body):
    """What may be written, by vLLM's names. At most one of them."""

    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema.")
    guided_regex: str | None = Field(None, description="A regex for the whole text.")
    guided_choice: Annotated[list[str], FAIL_FAST] | None = Field(
        None, description="The text is one of these."
    )
    guided_grammar: str | None = Field(None, description="Rules of Lark, or llama.cpp's GBNF.")

    def grammar(self) -> str | None:
        """The one constraint as an engine's grammar. Compiles: not for the event loop."""
        return chosen_grammar(self.constraints())

    def constraints(self) -> dict[str, Callable[[], str]]:
        """By field, how to make a grammar of each that was given."""
        found: dict[str, Callable[[], str]] = {}
        if (schema := self.guided_json) is not None:
            found["guided_json"] = lambda: json_schema_grammar(schema)
        if (pattern := self.guided_regex) is not None:
            found["guided_regex"] = lambda: regex_grammar(pattern)
        if (choices := self.guided_choice) is not None:
            found["guided_choice"] = lambda: choice_grammar(choices)
        if (rules := self.guided_grammar) is not None:
            found["guided_grammar"] = lambda: lark_grammar(rules)
        return found


def restricted(
    loaded: LoadedModel, request: GenerateRequest, grammar: str | None
) -> GenerateRequest:
    """`request` with `grammar`, after that was compiled: kept so, nobody has to wait for it."""
    if grammar is None:
        return request
    loaded.grammars.start(grammar, request.heal)
    return replace(request, grammar=grammar)


def chosen_grammar(constraints: dict[str, Callable[[], str]]) -> str | None:
    """The grammar of the one constraint there is; an error names its field."""
    if len(constraints) > 1:
        names = list(constraints)
        raise ApiError(400, f"{' and '.join(names)} are given (expected one of them)", names[1])
    for name, make in constraints.items():
        try:
            return make()
        except BadRequestError as error:
            raise ApiError(400, f"{name}: {error}", name) from None
        except BusyError:
            raise
        except StarquillError as error:  # the library is not installed
            raise ApiError(400, str(error), name) from None
    return None
