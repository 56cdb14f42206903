"""`--adapter` and `--lora`: what the verbs do with them, and the two adapters that ship."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import starquill
from starquill.cli.app import main
from starquill.cli.options import AdapterOptions, adapter_and_weight
from starquill.cli.serve import LoraOptions
from starquill.engine.chat import chat_template
from starquill.engine.engine import Engine
from starquill.engine.scoring import score_texts
from starquill.errors import BadRequestError
from starquill.loading import load
from starquill.types import GenerateRequest, Hole, SamplingParams
from tests import tiny
from tests.adapters import making
from tests.cli.test_errors import error_line
from tests.cli.test_serve import served

Capture = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
PROMPT = "def f"
PARAMS = SamplingParams(max_tokens=12, logit_bias={0: -100.0})
SETTINGS = ("-n", "12", "--logit-bias", "0=-100")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("options")
    found = {"base": tiny.write_checkpoint(top / "base")}
    for seed, name in enumerate(("a", "b")):
        found[name] = making.peft_folder(top / name, seed=seed, r=2)[0]
    return found


def loaded_with(folders: dict[str, Path], *names: str) -> starquill.LoadedModel:
    loaded = load(folders["base"])
    for name in names:
        loaded.adapters.load(name, folders[name])
    return loaded


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "acting"),
    [
        (["{a}"], {"a": 1.0}),
        (["{a}=0.5"], {"a": 0.5}),
        (["{a}=0.7", "{b}=-0.3"], {"a": 0.7, "b": -0.3}),
    ],
)
def test_generate_and_fill(
    folders: dict[str, Path], capsys: Capture, given: list[str], acting: dict[str, float]
) -> None:
    options = [part for one in given for part in ("--adapter", one.format(**folders))]
    engine = Engine(loaded_with(folders, *acting))
    model = ("-m", str(folders["base"]), *SETTINGS)
    expected = engine.complete(PROMPT, PARAMS, adapter=acting)
    assert expected != engine.complete(PROMPT, PARAMS)
    assert printed(capsys, "generate", *model, "-p", PROMPT, *options) == expected
    hole = engine.fill(Hole("def f", "return"), PARAMS, adapter=acting)
    assert hole != engine.fill(Hole("def f", "return"), PARAMS)
    assert printed(capsys, "fill", *model, "-p", "def f<fill>return", *options) == hole


def test_perplexity(folders: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    text = "def f(x):\n    return x\n"
    (tmp_path / "it.py").write_text(text)
    command = ("eval", "perplexity", "--data", str(tmp_path / "it.py"), "--json")
    model = ("-m", str(folders["base"]))
    found = json.loads(printed(capsys, *command, *model, "--adapter", f"{folders['a']}=0.5"))
    expected = score_texts(loaded_with(folders, "a"), [text], None, {"a": 0.5})
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    base = json.loads(printed(capsys, *command, *model))
    assert base["perplexity"] == pytest.approx(
        score_texts(load(folders["base"]), [text]).perplexity
    )
    assert base["perplexity"] != pytest.approx(found["perplexity"], rel=1e-3)


def test_bench_tells_what_acted(
    folders: dict[str, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it did: every step of every round has a mix of as many rows."""
    rows: list[int] = []
    model = load(folders["base"])
    embed = model.model.embed

    def noting(ids: Any, mix: Any) -> Any:
        rows.append(len(mix.rows))
        return embed(ids, mix)

    model.model.embed = noting
    monkeypatch.setattr("starquill.cli.run.load", lambda *_, **__: model)
    sizes = ("--prompt", "4", "--depth", "3", "--batch", "1,2", "--tokens", "2", "--rounds", "1")
    adapter = f"{folders['a']}=0.5"
    out = printed(capsys, "bench", *sizes, "--json", "--adapter", adapter)
    assert json.loads(out)["adapters"] == {str(folders["a"]): 0.5}
    assert rows == [1, 1, *[1] * (1 + 4), *[1, 1, *[2] * 4]]
    table = printed(capsys, "bench", *sizes, "--adapter", adapter)
    assert f"with {adapter}" in table.replace("\n", "")


def test_a_hub_id_is_downloaded(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    asked: list[Any] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repository, sorted(allow_patterns)))
        shutil.copytree(folders["a"], tmp_path / "cache", dirs_exist_ok=True)
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    model = ("-m", str(folders["base"]), *SETTINGS)
    found = printed(capsys, "generate", *model, "-p", PROMPT, "--adapter", "owner/name=0.5")
    assert found == Engine(loaded_with(folders, "a")).complete(PROMPT, PARAMS, adapter={"a": 0.5})
    files = ["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"]
    assert asked == [("owner/name", files)]


def test_paths_may_have_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert adapter_and_weight("lora") == ("lora", 1.0)
    assert adapter_and_weight("lora=0.5") == ("lora", 0.5)
    assert adapter_and_weight("r=8/lora") == ("r=8/lora", 1.0)
    assert adapter_and_weight("r=8=2") == ("r=8", 2.0)
    (tmp_path / "r=8").mkdir()
    assert adapter_and_weight("r=8") == ("r=8", 1.0)
    assert AdapterOptions(["x=1", "y=-2"]).chosen() == {"x": 1.0, "y": -2.0}
    for wrong in ("", "=1", "x=inf", "x=nan"):
        with pytest.raises(BadRequestError, match="expected PATH"):
            adapter_and_weight(wrong)


@pytest.mark.parametrize("verb", [("generate", "-p", PROMPT), ("fill", "-p", "a<fill>b")])
def test_mistakes_are_told_in_one_line(
    folders: dict[str, Path], tmp_path: Path, capsys: Capture, verb: tuple[str, ...]
) -> None:
    model = ("-m", str(folders["base"]), "-n", "12")
    missing = str(tmp_path / "missing")
    assert "no adapter at" in error_line(capsys, *verb, *model, "--adapter", missing)
    base = str(folders["base"])
    assert "adapter_config.json" in error_line(capsys, *verb, *model, "--adapter", base)
    twice = ("--adapter", "x", "--adapter", "x=2")
    assert "given twice" in error_line(capsys, *verb, *model, *twice)


def test_python_picks_an_adapter_too(folders: dict[str, Path]) -> None:
    loaded = loaded_with(folders, "a")
    engine = Engine(loaded)
    expected = "".join(d.text for d in engine.generate(PROMPT, PARAMS, adapter="a"))
    assert expected == engine.complete(PROMPT, PARAMS, adapter={"a": 1.0})
    ids = loaded.require_tokenizer().encode(PROMPT)
    by_ids = "".join(d.text for d in engine.generate(ids, PARAMS, adapter="a"))
    own = GenerateRequest("r", tuple(ids), PARAMS, adapter="a")
    assert "".join(d.text for d in engine.generate(own)) == by_ids
    with pytest.raises(BadRequestError, match="its own params and adapter"):
        engine.generate(own, adapter="a")
    with pytest.raises(BadRequestError, match="no adapter 'b'"):
        engine.complete(PROMPT, PARAMS, adapter="b")


def test_chat_picks_an_adapter(tmp_path: Path, folders: dict[str, Path]) -> None:
    base = tiny.write_checkpoint(tmp_path / "chat")
    raw = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tiny.write_json(base / "tokenizer_config.json", {**raw, "chat_template": template})
    loaded = load(base)
    assert loaded.tokenizer is not None
    assert chat_template(loaded.tokenizer) is not None
    loaded.adapters.load("a", folders["a"])
    engine, said = Engine(loaded), [{"role": "user", "content": PROMPT}]
    assert engine.chat(said, PARAMS, adapter="a") != engine.chat(said, PARAMS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lora": ["a"]}, "expected ALIAS=PATH"),
        ({"lora": ["=x"]}, "expected ALIAS=PATH"),
        ({"lora": ["a=x", "a=y"]}, "given twice"),
        ({"lora": ["a=x", "b=y"], "max_loras": 1}, "--max-loras 1"),
        ({"max_loras": 0}, "--max-loras is 0"),
        ({"max_lora_rank": 0}, "--max-lora-rank is 0"),
        ({"allow_lora_updates": True}, "go together"),
        ({"lora_root": Path("/")}, "go together"),
        ({"allow_lora_updates": True, "lora_root": Path("/nowhere")}, "expected a folder"),
    ],
)
def test_serve_refuses_what_makes_no_sense(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        LoraOptions(**options).chosen()


def test_serve_limits() -> None:
    found = LoraOptions(max_loras=3, max_lora_rank=8, max_lora_memory="1MiB", evict_loras=True)
    limits = found.limits()
    assert (limits.count, limits.rank, limits.bytes, limits.evict) == (3, 8, 2**20, True)
    assert LoraOptions(lora=["a=x=1"]).chosen() == {"a": "x=1"}


def test_serve_refuses_the_models_own_name(folders: dict[str, Path], capsys: Capture) -> None:
    given = ("serve", str(folders["base"]), "--port", "0", "--name", "mine")
    told = error_line(capsys, *given, "--lora", f"mine={folders['a']}")
    assert "the model's own name" in told


def test_served(folders: dict[str, Path]) -> None:
    lora = ("--lora", f"a={folders['a']}", "--lora", f"b={folders['b']}")
    updates = ("--allow-lora-updates", "--lora-root", str(folders["a"].parent))
    with served(str(folders["base"]), *lora, *updates) as server:
        assert server.block["adapters"] == "a, b"
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logit_bias": {"0": -100}}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "adapter": "b"})
        expected = Engine(loaded_with(folders, "b")).complete(PROMPT, PARAMS, adapter="b")
        assert answer.json()["choices"][0]["text"] == expected
        more = {"lora_name": "c", "lora_path": "a"}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=more).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "model": "c"})
        expected = Engine(loaded_with(folders, "a")).complete(PROMPT, PARAMS, adapter="a")
        assert answer.json()["choices"][0]["text"] == expected


def test_the_adapters_that_ship() -> None:
    """Small, for the embedded model, and each does what it is for."""
    files = [path for path in EXAMPLES.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"tests", "docstrings"}
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    loaded = starquill.load("default")
    for name in ("tests", "docstrings"):
        loaded.adapters.load(name, EXAMPLES / name)
    assert [info.rank for info in loaded.adapters.list()] == [8, 8]
    engine, params = Engine(loaded), SamplingParams(max_tokens=60)
    head = "def count_words(text, limit=None):\n"
    hole = Hole(head, "    words = text.split()\n    return len(words[:limit])\n")
    written = engine.fill(hole, params, adapter="docstrings")
    compile(head + written + hole.suffix, "filled", "exec")
    assert written.strip().startswith('"""')
    assert written.strip().endswith('"""')
    test = "class TestCount(unittest.TestCase):\n    def test_count_words(self):\n"
    assert "self.assert" in engine.complete(test, params, adapter="tests")
    assert "self.assert" not in engine.complete(test, params)
