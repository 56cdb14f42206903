"""Adapters over HTTP: who picks which, what is listed, and what may be loaded from where."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch

import starquill
from starquill.adapters.store import AdapterLimits
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.server.adapters import folder_below
from starquill.server.errors import ApiError
from starquill.types import EngineOptions, SamplingParams
from tests import tiny
from tests.adapters import making
from tests.server.serving import NAME, asking, serving, streamed

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
PROMPT, COUNT = "def f", 20
PARAMS = SamplingParams(max_tokens=COUNT, logit_bias={0: -100.0})
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": COUNT,
    "temperature": 0,
    "logit_bias": {"0": -100},
}
LLAMACPP: dict[str, Any] = {**BODY, "n_predict": COUNT, "input_prefix": PROMPT}
OLLAMA: dict[str, Any] = {
    "prompt": PROMPT,
    "stream": False,
    "options": {"temperature": 0, "num_predict": COUNT},
}
MIX = {"a": 0.7, "b": 0.3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Below one root: a base model, two adapters, and one of higher rank."""
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("root")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    base = tiny.write_checkpoint(top / "base", tiny.config(max_position_embeddings=4096))
    raw = json.loads((base / "tokenizer_config.json").read_text())
    tiny.write_json(base / "tokenizer_config.json", {**raw, "chat_template": template})
    found = {"base": base}
    for seed, (name, rank) in enumerate({"a": 4, "b": 2, "large": 8}.items()):
        found[name] = making.peft_folder(top / name, seed=seed, r=rank)[0]
    return found


@pytest.fixture
def loaded(folders: dict[str, Path]) -> LoadedModel:
    found = load(folders["base"])
    for name in ("a", "b"):
        found.adapters.load(name, folders[name])
    return found


@pytest.fixture
def root(folders: dict[str, Path]) -> Path:
    return folders["a"].parent


@pytest.fixture
def client(loaded: LoadedModel, root: Path) -> Iterator[Any]:
    with asking(loaded, lora_root=root) as found:
        yield found


def alone(loaded: LoadedModel, adapter: Any, **options: Any) -> str:
    return Engine(loaded).complete(PROMPT, PARAMS, adapter=adapter, **options)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if "choices" not in found:
        return str(found.get("content", found.get("response")))
    choice = found["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(
    ("picked", "adapter", "named"),
    [
        ({}, None, NAME),
        ({"adapter": "a"}, "a", "a"),
        ({"model": "b"}, "b", "b"),
        ({"model": NAME, "adapter": MIX}, MIX, NAME),
        ({"adapter": {}}, None, NAME),
        ({"model": "a", "adapter": "a"}, "a", "a"),
        ({"adapter": None}, None, NAME),
    ],
)
def test_completions_and_chat_pick(
    loaded: LoadedModel, client: Any, picked: dict[str, Any], adapter: Any, named: str
) -> None:
    answer = client.post("/v1/completions", json={**BODY, **picked})
    assert text_of(answer) == alone(loaded, adapter)
    assert answer.json()["model"] == named
    lines = client.post("/v1/completions", json={**BODY, **picked, "stream": True}).iter_lines()
    parts = streamed(lines)
    assert "".join(part["choices"][0]["text"] for part in parts) == alone(loaded, adapter)
    assert {part["model"] for part in parts} == {named}
    said = [{"role": "user", "content": PROMPT}]
    answer = client.post("/v1/chat/completions", json={**BODY, "messages": said, **picked})
    assert text_of(answer) == Engine(loaded).chat(said, PARAMS, adapter=adapter)
    assert answer.json()["model"] == named


@pytest.mark.parametrize(
    ("picked", "adapter"),
    [
        ({}, None),
        ({"adapter": "a"}, "a"),
        ({"model": "b"}, "b"),
        ({"model": "gpt"}, None),
        ({"adapter": MIX}, MIX),
        ({"lora": [{"id": 1, "scale": 1.0}]}, "b"),
        ({"lora": [{"id": 0, "scale": 0.7}, {"id": 1, "scale": 0.3}]}, MIX),
        ({"lora": [{"id": 0, "scale": 0.0}]}, None),
        ({"lora": []}, None),
    ],
)
def test_llamacpps_routes_pick(
    loaded: LoadedModel, client: Any, picked: dict[str, Any], adapter: Any
) -> None:
    assert text_of(client.post("/completion", json={**LLAMACPP, **picked})) == alone(
        loaded, adapter
    )
    hole = starquill.Hole(PROMPT, "")
    expected = Engine(loaded).fill(hole, PARAMS, adapter=adapter)
    assert text_of(client.post("/infill", json={**LLAMACPP, "prompt": "", **picked})) == expected


def test_llamacpps_list_is_in_the_order_of_its_ids(client: Any, folders: dict[str, Path]) -> None:
    assert client.get("/lora-adapters").json() == [
        {"id": 0, "path": str(folders["a"]), "scale": 0.0},
        {"id": 1, "path": str(folders["b"]), "scale": 0.0},
    ]


def test_ollamas_routes_pick_by_the_models_name(loaded: LoadedModel) -> None:
    greedy = SamplingParams(max_tokens=COUNT)
    with serving(loaded) as url:
        client = ollama.Client(url)
        assert [one.model for one in client.list().models] == [NAME, "a", "b"]
        for name, adapter in ((NAME, None), ("a", "a"), ("b:latest", "b")):
            expected = Engine(loaded).complete(PROMPT, greedy, adapter=adapter)
            answer = client.generate(name, PROMPT, raw=True, options=OLLAMA["options"])
            assert answer.response == expected
            assert answer.model == name.removesuffix(":latest")
        with pytest.raises(ollama.ResponseError, match="'c' not found") as caught:
            client.generate("c", PROMPT)
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("route", "picked", "status", "field"),
    [
        ("/v1/completions", {"adapter": "c"}, 404, "adapter"),
        ("/v1/completions", {"adapter": {"a": 1, "c": 1}}, 404, "adapter"),
        ("/v1/completions", {"model": "c"}, 404, "model"),
        ("/v1/completions", {"model": "a", "adapter": "b"}, 400, "adapter"),
        ("/v1/completions", {"adapter": {"a": "much"}}, 400, "adapter"),
        ("/v1/completions", {"adapter": ["a"]}, 400, "adapter"),
        ("/v1/completions", {"adapter": {"a": 1e9}}, 400, None),
        ("/completion", {"adapter": "c"}, 404, "adapter"),
        ("/completion", {"lora": [{"id": 2, "scale": 1}]}, 404, "lora"),
        ("/completion", {"lora": [{"id": -1, "scale": 1}]}, 404, "lora"),
        ("/infill", {"lora": [{"scale": 1}]}, 400, None),
    ],
)
def test_what_is_not_there_is_told_in_the_routes_form(
    client: Any, route: str, picked: dict[str, Any], status: int, field: str | None
) -> None:
    answer = client.post(route, json={**LLAMACPP, **picked})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert field is None or error["param"] == field
    if status == 404:
        assert error["type"] == "not_found_error"


def test_models_lists_them_with_their_parent(loaded: LoadedModel) -> None:
    with serving(loaded) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        found = {one.id: one for one in client.models.list()}
        assert list(found) == [NAME, "a", "b"]
        assert found["a"].model_extra == {"parent": NAME}
        assert client.models.retrieve("b").id == "b"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("c")


def test_two_adapters_and_the_base_at_once_by_openais_client() -> None:
    """The adapters that ship, on the embedded model."""
    loaded = starquill.load("default")
    for name in ("tests", "docstrings"):
        loaded.adapters.load(name, EXAMPLES / name)
    params = SamplingParams(max_tokens=24)
    ways: list[Any] = ["default", "tests", "docstrings", {"tests": 0.5, "docstrings": 0.5}]
    expected = [
        Engine(loaded).complete(PROMPT, params, adapter=None if way == "default" else way)
        for way in ways
    ]
    assert len(set(expected)) >= 3
    with serving(loaded, name="default") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(way: Any) -> str:
            model, extra = (way, {}) if isinstance(way, str) else ("default", {"adapter": way})
            stream = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=24, temperature=0, stream=True,
                extra_body=extra,
            )  # fmt: skip
            return "".join(part.choices[0].text for part in stream)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, ways * 2)) == expected * 2


def test_b43_no_cache_crosses_adapters_over_http(
    loaded: LoadedModel, client: Any, folders: dict[str, Path]
) -> None:
    """B43: one prompt with A, B, none, half of A, then other bytes under the name of A."""
    long = {**BODY, "prompt": "def f(x): return x  # " * 40}
    cold = load(folders["base"])
    for name in ("a", "b"):
        cold.adapters.load(name, folders[name])
    engine = Engine(cold, EngineOptions(prefix_cache=False))
    for _ in range(2):
        for adapter in ("a", "b", None, {"a": 0.5}, {"a": 1.0}):
            answer = client.post("/v1/completions", json={**long, "adapter": adapter})
            assert text_of(answer) == engine.complete(long["prompt"], PARAMS, adapter=adapter)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    change = {"lora_name": "a", "lora_path": "large", "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=change).status_code == 200
    cold.adapters.load("a", folders["large"])
    answer = client.post("/v1/completions", json={**long, "adapter": "a"})
    assert text_of(answer) == engine.complete(long["prompt"], PARAMS, adapter="a")


class Held:
    """Stands before a model: after `free` steps it stops until `open`."""

    def __init__(self, loaded: LoadedModel, free: int) -> None:
        self.embed, self.left = loaded.model.embed, free
        self.reached, self.opened = threading.Event(), threading.Event()
        loaded.model.embed = self

    def __call__(self, ids: Any, mix: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            self.reached.set()
            assert self.opened.wait(60)
        return self.embed(ids, mix)


@pytest.mark.parametrize("way", ["replace", "unload"])
def test_a_stream_goes_on_when_its_adapter_changes(
    loaded: LoadedModel, root: Path, way: str
) -> None:
    """And neither waits for the engine, which stands still meanwhile."""
    expected, held = alone(loaded, "a"), Held(loaded, free=5)
    with (
        serving(loaded, lora_root=root) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="a", prompt=PROMPT, max_tokens=COUNT, temperature=0, stream=True,
            logit_bias={"0": -100},
        )  # fmt: skip
        written = next(iter(stream)).choices[0].text
        assert held.reached.wait(60)
        if way == "replace":
            body = {"lora_name": "a", "lora_path": "large", "load_inplace": True}
            httpx.post(f"{url}/v1/load_lora_adapter", json=body).raise_for_status()
        else:
            body = {"lora_name": "a"}
            httpx.post(f"{url}/v1/unload_lora_adapter", json=body).raise_for_status()
        held.opened.set()
        written += "".join(part.choices[0].text for part in stream)
        assert written == expected
        after = httpx.post(f"{url}/v1/completions", json={**BODY, "model": "a"})
        if way == "unload":
            assert after.status_code == 404
        else:
            assert text_of(after) == alone(loaded, "a") != expected


def test_loading_holds_up_nobody(
    loaded: LoadedModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a folder is read, others are answered; of two loads of one name one is refused."""
    began, go = threading.Event(), threading.Event()
    plain = loaded.adapters.load

    def slow(alias: str, folder: Path) -> Any:
        began.set()
        assert go.wait(60)
        return plain(alias, folder)

    monkeypatch.setattr(loaded.adapters, "load", slow)
    body = {"lora_name": "c", "lora_path": "a"}
    with serving(loaded, lora_root=root) as url, ThreadPoolExecutor(2) as pool:

        def post() -> int:
            return httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code

        both = [pool.submit(post) for _ in range(2)]
        assert began.wait(60)
        assert text_of(httpx.post(f"{url}/v1/completions", json=BODY)) == alone(loaded, None)
        go.set()
        assert sorted(one.result() for one in both) == [200, 400]


def test_the_life_of_an_adapter(client: Any, loaded: LoadedModel, folders: dict[str, Path]) -> None:
    made = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "large"})
    facts = made.json()
    assert facts["id"] == "c"
    assert facts["object"] == "lora_adapter"
    assert (facts["source"], facts["rank"]) == (str(folders["large"]), 8)
    assert facts["bytes"] == sum(info.nbytes for info in loaded.adapters.list()[2:])
    listed = client.get("/v1/lora_adapters").json()
    assert [one["id"] for one in listed["data"]] == ["a", "b", "c"]
    assert listed["data"][2] == facts
    assert listed["max_adapters"] == loaded.adapters.limits.count
    again = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "a"})
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    body = {"lora_name": "c", "lora_path": str(folders["a"]), "load_inplace": True}
    replaced = client.post("/v1/load_lora_adapter", json=body).json()
    assert replaced["generation"] != facts["generation"]
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
    assert gone.json() == replaced
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 404


def test_without_the_option_nothing_is_loaded(loaded: LoadedModel) -> None:
    with asking(loaded) as client:
        for route, body in (
            ("load", {"lora_name": "c", "lora_path": "a"}),
            ("unload", {"lora_name": "a"}),
        ):
            answer = client.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code == 403
            assert "--allow-lora-updates" in answer.json()["error"]["message"]
        assert [one["id"] for one in client.get("/v1/lora_adapters").json()["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (AdapterLimits(count=2), "no room"),
        (AdapterLimits(rank=7), "rank 8"),
        (AdapterLimits(bytes=1000), "bytes"),
    ],
)
def test_limits(client: Any, loaded: LoadedModel, limits: AdapterLimits, told: str) -> None:
    loaded.adapters.limits = limits
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "large"})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    if told == "no room":
        loaded.adapters.limits = AdapterLimits(count=2, evict=True)
        client.post("/v1/completions", json={**BODY, "model": "a"})
        body = {"lora_name": "c", "lora_path": "large"}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert {info.alias for info in loaded.adapters.list()} == {"a", "c"}


@pytest.mark.parametrize(
    ("name", "path"), [(NAME, "a"), ("", "a"), ("x" * 1000, "a"), ("c", "base"), ("c", "nowhere")]
)
def test_mistakes(client: Any, name: str, path: str) -> None:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    assert answer.status_code == (404 if path == "nowhere" else 400), answer.text
    assert answer.json()["error"]["param"] in ("lora_name", "lora_path")


class TestPaths:
    """What `--lora-root` lets in, by the path that is real."""

    @pytest.fixture
    def places(self, tmp_path: Path, folders: dict[str, Path]) -> Path:
        """A root, and beside it a folder that nobody may open."""
        for name in ("root/in", "root/deep/in", "outside"):
            shutil.copytree(folders["a"], tmp_path / name)
        root = tmp_path / "root"
        (root / "within").symlink_to("deep/in")
        (root / "out").symlink_to(tmp_path / "outside")
        (root / "up").symlink_to("..")
        (root / "loop").symlink_to("loop")
        for name in ("file", "fifo", "zero", "dir"):
            (root / name).mkdir()
            shutil.copy(folders["a"] / making.CONFIG, root / name / making.CONFIG)
        (root / "file" / making.FILE).symlink_to(tmp_path / "outside" / making.FILE)
        (root / "zero" / making.FILE).symlink_to("/dev/zero")
        os.mkfifo(root / "fifo" / making.FILE)
        (root / "dir" / making.FILE).mkdir()
        return root

    @pytest.mark.parametrize(
        "text", ["in", "deep/in", "./in", "deep/../in", "within", "{root}/in", "up/root/in"]
    )
    def test_inside(self, places: Path, text: str) -> None:
        found = folder_below(places, text.format(root=places))
        assert found.is_relative_to(places.resolve())
        assert (found / making.CONFIG).is_file()

    @pytest.mark.parametrize(
        "text",
        [
            "../outside",
            "..",
            "in/../../outside",
            "out",
            "up/outside",
            "{root}/../outside",
            "{outside}",
            "/etc",
            "/dev/zero",
            "/nowhere/at/all",
            "file",
            "zero",
            "~/x/../../../..",
        ],
    )
    def test_outside(self, places: Path, text: str) -> None:
        given = text.format(root=places, outside=places.parent / "outside")
        with pytest.raises(ApiError) as caught:
            folder_below(places, given)
        assert caught.value.status == 403

    @pytest.mark.parametrize(
        ("text", "status"),
        [("loop", 400), ("a\0b", 400), ("fifo", 400), ("dir", 400), ("nowhere", 404), ("", 400),
         ("x" * 5000, 400), ("in/adapter_config.json", 404)],
    )  # fmt: skip
    def test_no_folder(self, places: Path, text: str, status: int, loaded: LoadedModel) -> None:
        """By a request, which gets its answer: a pipe without a writer would never end."""
        with asking(loaded, lora_root=places) as client:
            body = {"lora_name": "c", "lora_path": text}
            answer = client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == "lora_path"

    def test_by_request(self, places: Path, loaded: LoadedModel) -> None:
        with asking(loaded, lora_root=places) as client:
            body = {"lora_name": "c", "lora_path": "out"}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 403
            body = {"lora_name": "c", "lora_path": "within"}
            found = client.post("/v1/load_lora_adapter", json=body).json()
        assert found["source"] == str((places / "deep" / "in").resolve())
