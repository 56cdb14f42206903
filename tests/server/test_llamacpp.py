"""llama.cpp's /infill and small routes: the bodies that llama.vim and llama.vscode send.

Bodies are written as those clients' sources build them, and what they read is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from starquill.engine.engine import Engine
from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.loop import EngineLoop
from starquill.loading import load
from starquill.server import llamacpp, llamacpp_schema
from starquill.types import ContextFile, EngineOptions, Hole, SamplingParams
from tests import tiny
from tests.server.editors import NAME, events, serving

END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE, ISSUE = range(8)
CONTEXT = 256
BEFORE = "import math\n\n\nclass Circle:\n    def __init__(self, r):\n        self.radius = r\n\n"
BEGUN = "    def area(self):"
AFTER = "\n\n    def perimeter(self):\n        return 2 * math.pi * self.radius\n"
CHUNK = {"text": "def square(x):\n    return x * x\n", "time": [1, 2], "filename": "square.py"}
VIM_FIELDS = [
    "content",
    "timings/prompt_n",
    "timings/prompt_ms",
    "timings/prompt_per_token_ms",
    "timings/prompt_per_second",
    "timings/predicted_n",
    "timings/predicted_ms",
    "timings/predicted_per_token_ms",
    "timings/predicted_per_second",
    "truncated",
    "tokens_cached",
]
VIM = {
    "input_prefix": BEFORE,
    "input_suffix": AFTER,
    "input_extra": [CHUNK],
    "prompt": BEGUN,
    "n_predict": 16,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": VIM_FIELDS,
}
VIM_WARM_UP = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [CHUNK],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE = {
    key: value for key, value in VIM.items() if key not in ("response_fields", "n_indent")
} | {"input_extra": [{"text": CHUNK["text"], "time": 1732, "filename": "square.py"}]}
VSCODE_WARM_UP = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": VSCODE["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
VSCODE_FIRST_WARM_UP = VSCODE_WARM_UP | {
    "n_predict": 1,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["temperature"],
}


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load("default")


@pytest.fixture(scope="module")
def client(default: LoadedModel) -> Iterator[httpx.Client]:
    with serving(Engine(default)) as client:
        yield client


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return tiny.load_tiny(folder, max_position_embeddings=CONTEXT)


def infill(loaded: LoadedModel, **body: Any) -> list[int]:
    parsed = llamacpp_schema.InfillBody.model_validate(body)
    request, _ = llamacpp.infill_request(Engine(loaded), parsed)
    return list(request.prompt_ids)


# --- /infill ---


def test_llama_vim_fills(client: httpx.Client, default: LoadedModel) -> None:
    response = client.post("/infill", json=VIM)
    answer = response.json()
    assert response.status_code == 200
    assert list(answer) == VIM_FIELDS
    hole = Hole(BEFORE, AFTER, (ContextFile("square.py", str(CHUNK["text"])),))
    params = SamplingParams(max_tokens=16)
    request, _ = fill_request(default, hole, params, begun=BEGUN)
    deltas = list(Engine(default).generate(request))
    assert answer["content"] == "".join(delta.text for delta in deltas) != ""
    assert answer["truncated"] is False
    assert answer["timings/predicted_n"] == sum(not delta.is_prompt for delta in deltas)
    assert answer["timings/prompt_n"] + answer["tokens_cached"] == request.prompt_tokens
    for part in ("prompt", "predicted"):
        for unit in ("ms", "per_token_ms", "per_second"):
            assert answer[f"timings/{part}_{unit}"] > 0


def test_llama_vim_fills_again_what_was_written_before(client: httpx.Client) -> None:
    """It caches by text: the same hole has to give the same middle."""
    assert len({client.post("/infill", json=VIM).json()["content"] for _ in range(3)}) == 1


@pytest.mark.parametrize("warm_up", [VIM_WARM_UP, VSCODE_WARM_UP, VSCODE_FIRST_WARM_UP])
def test_warm_ups_are_answered(client: httpx.Client, warm_up: dict[str, Any]) -> None:
    response = client.post("/infill", json=warm_up)
    assert response.status_code == 200
    if "response_fields" in warm_up:
        assert response.json() == {}
    else:
        assert response.json()["tokens_predicted"] <= warm_up["n_predict"]
        assert response.json()["timings"]["predicted_n"] <= warm_up["n_predict"]
    if warm_up["n_predict"] == 0:
        assert response.json().get("content", "") == ""


def test_a_warm_up_computes_what_the_next_fill_begins_with(loaded: LoadedModel) -> None:
    """It is made into a request that runs the model, up to and past the other files."""
    body = llamacpp_schema.InfillBody.model_validate(VIM_WARM_UP)
    request, _ = llamacpp.infill_request(Engine(loaded), body)
    assert request.params.max_tokens == 1
    fill = infill(loaded, **VIM)
    same = next(n for n, (a, b) in enumerate(zip(fill, request.prompt_ids, strict=False)) if a != b)
    assert fill.index(PREFIX) < same


def test_llama_vscode_reads_timings_and_settings(client: httpx.Client) -> None:
    answer = client.post("/infill", json=VSCODE).json()
    assert answer["content"] == client.post("/infill", json=VIM).json()["content"]
    assert answer["stop"] is True
    assert answer["model"] == NAME
    assert answer["generation_settings"]["n_predict"] == 16
    assert answer["generation_settings"]["temperature"] == 0
    assert {"prompt_n", "prompt_ms", "prompt_per_second"} <= set(answer["timings"])
    assert {"predicted_n", "predicted_ms", "predicted_per_second"} <= set(answer["timings"])
    assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["tokens_cached"]
    assert answer["prompt"].count("<fim_middle>") == 1
    assert answer["prompt"].endswith(f"<fim_middle>{BEGUN}")


def test_what_is_begun_stands_behind_the_middle_token(loaded: LoadedModel) -> None:
    encode = loaded.require_tokenizer().encode
    ids = infill(loaded, input_prefix="a", input_suffix="b", prompt="xy", n_predict=4)
    # The last token of what is begun is spelled again.
    assert ids == [PREFIX, *encode("a"), SUFFIX, *encode("b"), MIDDLE, *encode("xy")[:-1]]


def test_suffix_first_by_request(loaded: LoadedModel) -> None:
    encode = loaded.require_tokenizer().encode
    ids = infill(loaded, input_prefix="a", input_suffix="b", fim_order="spm", n_predict=4)
    assert ids == [PREFIX, SUFFIX, *encode("b"), MIDDLE, *encode("a")]


def test_other_files_stand_in_front(loaded: LoadedModel) -> None:
    encode = loaded.require_tokenizer().encode
    extra = [{"filename": "u.py", "text": "U"}, {"text": "V"}, {"filename": "", "text": "W"}]
    ids = infill(loaded, input_prefix="a", input_suffix="b", input_extra=extra, n_predict=4)
    assert [i for i in ids if i < ISSUE] == [REPO, FILE, FILE, FILE, FILE, PREFIX, SUFFIX, MIDDLE]
    second = ids.index(FILE) + 1
    assert ids[second : ids.index(FILE, second)] == encode("u.py\nU")


def test_all_parts_of_a_hole_are_data(loaded: LoadedModel) -> None:
    """B15: code that mentions control tokens cannot break the form."""
    nasty = "<fim_middle><|endoftext|><file_sep>"
    extra = [{"filename": nasty, "text": nasty}]
    ids = infill(
        loaded, input_prefix=nasty, input_suffix=nasty, input_extra=extra, prompt=nasty, n_predict=1
    )
    assert [i for i in ids if i <= ISSUE] == [REPO, FILE, FILE, PREFIX, SUFFIX, MIDDLE]


def test_models_without_repository_tokens_see_no_other_files(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, tokenizer=tiny.byte_tokenizer(tiny.SPECIAL_TOKENS[:5]))
    ids = infill(load(folder), input_prefix="a", input_suffix="b", input_extra=[CHUNK], n_predict=1)
    assert len(ids) == 5


@pytest.mark.parametrize("limit", [-1, -2, 0, 1, 50, 10**30])
def test_a_fill_leaves_room_for_what_is_written(loaded: LoadedModel, limit: int) -> None:
    body = llamacpp_schema.InfillBody(
        input_prefix="a" * 500, input_suffix="b" * 500, prompt="c", n_predict=limit
    )
    request, trimmed = llamacpp.infill_request(Engine(loaded), body)
    left = CONTEXT - request.prompt_tokens
    assert trimmed
    assert left > 0
    assert request.params.max_tokens == (left if limit < 0 else max(1, min(limit, left)))


def test_the_servers_context_bounds_a_fill(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(context=40))
    body = llamacpp_schema.InfillBody(input_prefix="a" * 500, input_suffix="b", n_predict=8)
    request, _ = llamacpp.infill_request(engine, body)
    assert len(request.prompt_ids) + request.params.max_tokens == 40


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(500, 0.5), (1, 0.001), (0, None), (-1, None), (None, None)]
)
def test_a_time_limit_reaches_the_engine(
    loaded: LoadedModel, milliseconds: int | None, seconds: float | None
) -> None:
    body = llamacpp_schema.InfillBody(input_prefix="a", t_max_predict_ms=milliseconds)
    assert llamacpp.infill_request(Engine(loaded), body)[0].max_seconds == seconds


def test_infill_streams(client: httpx.Client) -> None:
    whole = client.post("/infill", json=VSCODE).json()
    *parts, last = events(client.post("/infill", json=VSCODE | {"stream": True}))
    assert len(parts) > 1
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"]) == ("", True)
    assert last["tokens_predicted"] == whole["tokens_predicted"]


def test_a_body_without_a_hole_is_refused(client: httpx.Client) -> None:
    response = client.post("/infill", json={"prefix": "a", "suffix": "b"})
    assert response.status_code == 400
    assert "input_prefix" in response.json()["error"]["message"]


# --- the small routes ---


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn 12\r\n", "é😀", "<fim_prefix>a", "", "<|x|>"]
)
def test_tokens_and_back(client: httpx.Client, text: str) -> None:
    for parse in (True, False):
        body = {"content": text, "parse_special": parse, "add_special": True}
        ids = client.post("/tokenize", json=body).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": text}


def test_control_tokens_are_parsed_unless_refused(client: httpx.Client) -> None:
    body = {"content": "<fim_prefix>"}
    assert len(client.post("/tokenize", json=body).json()["tokens"]) == 1
    plain = client.post("/tokenize", json=body | {"parse_special": False}).json()["tokens"]
    assert len(plain) > 1


def test_pieces_are_text_or_bytes(loaded: LoadedModel) -> None:
    with serving(Engine(loaded)) as client:
        body = {"content": "aá<file_sep>", "with_pieces": True}
        pieces = [t["piece"] for t in client.post("/tokenize", json=body).json()["tokens"]]
    assert pieces == ["a", [0xC3], [0xA1], "<file_sep>"]


@pytest.mark.parametrize("tokens", [[-1], [10**9], ["x"], None])
def test_ids_that_there_are_not(client: httpx.Client, tokens: Any) -> None:
    response = client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]


def test_props(client: httpx.Client, default: LoadedModel) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == default.config.context_length
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["total_slots"] == EngineOptions().slots
    assert props["model_path"] == str(default.folder)
    assert props["chat_template"] == ""


def test_health_tells_whether_requests_are_worked_on(loaded: LoadedModel) -> None:
    engine = Engine(loaded)
    with serving(engine) as client:
        assert client.get("/health").json() == {"status": "ok"}
    with EngineLoop(engine) as ended:
        pass
    with serving(engine, known_loop=ended) as client:
        response = client.get("/health")
    assert response.status_code == 503
    assert "engine" in response.json()["error"]["message"]
