"""Whatever fits the OpenAPI document, or nearly does, is answered without a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from starlette.testclient import TestClient

from starquill.types import EngineOptions
from tests import tiny
from tests.server.serving import asking


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    loaded = tiny.load_tiny(tmp_path_factory.mktemp("tiny"))
    # Room for what one body may ask for: then it is not the queue that refuses it.
    with asking(loaded, EngineOptions(slots=4, queue=1000)) as found:
        yield found


def test_no_request_is_a_fault(client: TestClient) -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    operations = [found.ok() for found in document.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/models"}
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            _ask(operation.as_strategy(generation_mode=mode))


def _ask(cases: SearchStrategy[schemathesis.Case]) -> None:
    @given(cases)
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        assert case.call().status_code < 500

    with suppress(Unsatisfiable):  # a route without parameters cannot be asked wrongly
        ask()
