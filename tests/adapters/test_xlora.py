"""X-LoRA against PEFT's, alone and in the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.adapters.xlora import CLASSIFIER
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import AdapterError, BadRequestError, CapacityError, UnsupportedError
from starquill.loading import load
from starquill.types import EngineOptions, GenerateRequest, SamplingParams
from tests import tiny
from tests.adapters import making, making_xlora
from tests.adapters.making_xlora import COUNT, FORMS

IDS = making.IDS
LAYERS = 12  # Linears that carry adapters: all but the head
MOST = 20  # tokens that are reported at each place
OPTIONS: dict[str, dict[str, Any]] = {
    "depth 1": {},
    "depth 2": {"xlora_depth": 2},
    "depth 3": {"xlora_depth": 3, "layerwise_scalings": True},
    "layerwise": {"layerwise_scalings": True},
    "temperature": {"softmax_temperature": 0.5, "layerwise_scalings": True},
    "top k": {"top_k_lora": 1, "layerwise_scalings": True, "xlora_depth": 2},
    "top k of 2": {"top_k_lora": 2, "enable_softmax_topk": True, "layerwise_scalings": True},
    "softmax of top k": {"top_k_lora": 2, "enable_softmax_topk": True, "enable_softmax": False},
    "no softmax": {"enable_softmax": False, "layerwise_scalings": True},
    "weight": {"global_scaling_weight": 2.0, "xlora_depth": 2},
    "pass value": {"scaling_pass_value": 0.4, "global_scaling_weight": 1.5},
    "pass value, top k": {"scaling_pass_value": 0.4, "top_k_lora": 2, "layerwise_scalings": True},
    "no dropout": {"xlora_depth": 2, "xlora_dropout_p": 0.0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return making_xlora.adapters(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("xlora") / "base")


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> tuple[Any, Path]:
    """A reference with scalings of each layer, and its folder."""
    model = making_xlora.reference(folders, layerwise_scalings=True, xlora_depth=2)
    top = tmp_path_factory.mktemp("layered")
    return model, making_xlora.write(top / "it", model, folders, "xlora")


def request(ids: list[int], tokens: int = 12, **options: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, logprobs=MOST, logit_bias={0: -1e4})
    return GenerateRequest("r", tuple(ids), params, **options)


def generated(engine: Engine, made: GenerateRequest) -> tuple[list[int], Tensor, Tensor]:
    """Tokens, log probabilities `[n, V]` of the likeliest, scalings `[T, M, K]`."""
    generation = engine.generate(made)
    deltas = list(generation)
    found = generation.scalings
    assert found is not None
    return [d.token_id or 0 for d in deltas], _rows([d.logprobs for d in deltas]), found


def _rows(reports: list[Any]) -> Tensor:
    rows = torch.zeros(len(reports), 320)
    for row, report in zip(rows, reports, strict=True):
        for one in report.top:
            row[one.token_id] = one.logprob
    return rows


def prompt_logprobs(loaded: LoadedModel, options: EngineOptions) -> tuple[Tensor, Tensor]:
    """Of the whole of `IDS`, the last token written included: `[T, V]`, scalings `[T, M, K]`."""
    generation = Engine(loaded, options).generate(request(IDS, 1, prompt_logprobs=MOST))
    (delta,) = list(generation)
    assert delta.prompt_logprobs is not None
    assert generation.scalings is not None
    return _rows([*delta.prompt_logprobs[1:], delta.logprobs]), generation.scalings


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def same(found: Tensor, logits: Tensor) -> None:
    """The reported log probabilities are those of `logits` `[T, V]`."""
    assert bool(((found != 0).sum(-1) >= MOST).all())
    close(found, torch.where(found == 0, 0.0, logits.log_softmax(-1)))


@pytest.mark.parametrize(
    ("name", "form"),
    # xlora numbers its tensors as if there were always dropout.
    [(name, form) for name in OPTIONS for form in FORMS if (name, form) != ("no dropout", "xlora")],
)
def test_equals_peft(tmp_path: Path, folders: list[Path], base: Path, name: str, form: str) -> None:
    """Prompt in one piece and in several, every option, both forms of the files."""
    model = making_xlora.reference(folders, **OPTIONS[name])
    logits, scalings = making_xlora.computed(model)
    folder = making_xlora.write(tmp_path / form, model, folders, form)
    loaded = load(base, xlora=folder)
    for chunk in (512, 7):
        found, acted = prompt_logprobs(loaded, EngineOptions(prefill_chunk=chunk))
        close(acted, scalings)
        same(found, logits)
    assert acted.shape == (len(IDS), LAYERS, COUNT)


@pytest.mark.parametrize("lookup", [0, 8])
def test_cached_decode_equals_the_whole_each_time(
    layered: tuple[Any, Path], base: Path, lookup: int
) -> None:
    """With proposals verified in the same step too: the text repeats."""
    model, folder = layered
    loaded = load(base, xlora=folder)
    repeated = [*IDS[:7], *IDS[:7], *IDS[:5]]
    engine = Engine(loaded, EngineOptions(lookup=lookup, prefill_chunk=8))
    made = request(repeated, 40)
    tokens, found, acted = generated(engine, made)
    logits, scalings = making_xlora.computed(model, [*repeated, *tokens[:-1]])
    close(acted, scalings)
    same(found, logits[len(repeated) - 1 :])
    assert engine.stats().cache_bytes_used == 0


def test_long_texts_in_little_memory(layered: tuple[Any, Path], tmp_path: Path) -> None:
    """Both passes give back what the window has passed: there is room for it twice, no more."""
    model, folder = layered
    raw = tiny.config(max_position_embeddings=512)
    loaded = load(tiny.write_checkpoint(tmp_path / "long", raw), xlora=folder)
    prompt, chunk = tiny.random_ids(200, seed=7), 16
    most = loaded.config.cache_shape().most_blocks(512, chunk + 1) + 1
    room = 2 * most * tiny.cache_block_bytes(loaded)
    engine = Engine(loaded, EngineOptions(cache_bytes=room, prefill_chunk=chunk))
    tokens, found, acted = generated(engine, request(prompt, 150))
    logits, scalings = making_xlora.computed(model, [*prompt, *tokens[:-1]])
    close(acted, scalings)
    same(found, logits[len(prompt) - 1 :])
    with pytest.raises(CapacityError, match="too little"):
        Engine(loaded, EngineOptions(cache_bytes=room - 1, prefill_chunk=chunk))


def test_wrong_proposals_leave_no_trace(
    layered: tuple[Any, Path], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some right, then wrong ones: both caches and the scalings go back."""
    model, folder = layered
    loaded = load(base, xlora=folder)
    truth, _, _ = generated(Engine(loaded, EngineOptions(lookup=0)), request(IDS, 30))

    def propose(lookup: Any, *_: Any) -> list[int]:
        at = len(lookup._ids) - len(IDS)
        return [*truth[at : at + at % 3], 7, 9][: max(0, 28 - at)]

    monkeypatch.setattr("starquill.engine.lookup.PromptLookup.propose", propose)
    engine = Engine(loaded)
    tokens, found, acted = generated(engine, request(IDS, 30))
    assert tokens == truth
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.proposed_tokens
    logits, scalings = making_xlora.computed(model, [*IDS, *tokens[:-1]])
    close(acted, scalings)
    same(found, logits[len(IDS) - 1 :])


def test_requests_together_equal_those_alone(layered: tuple[Any, Path], base: Path) -> None:
    """To the last bit: nothing of one reaches another, and a failed step is taken back."""
    loaded = load(base, xlora=layered[1])
    prompts = [IDS, IDS[3:9], tiny.random_ids(30, seed=5), IDS]
    options = EngineOptions(lookup=0, prefill_chunk=16)
    alone = [generated(Engine(loaded, options), request(ids)) for ids in prompts]
    engine = Engine(loaded, options)
    running = [engine.generate(request(ids)) for ids in prompts]
    found = [list(generation) for generation in running]
    for deltas, generation, (tokens, rows, scalings) in zip(found, running, alone, strict=True):
        assert [d.token_id for d in deltas] == tokens
        assert torch.equal(_rows([d.logprobs for d in deltas]), rows)
        assert generation.scalings is not None
        assert torch.equal(generation.scalings, scalings)


def test_a_failed_step_is_done_again(
    layered: tuple[Any, Path], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(base, xlora=layered[1])
    options = EngineOptions(lookup=0)
    alone = [generated(Engine(loaded, options), request(ids)) for ids in (IDS, IDS[3:9])]
    engine = Engine(loaded, options)
    running = [engine.generate(request(ids)) for ids in (IDS, IDS[3:9])]
    decode, failures = engine._stepper._runner.decode, []

    def fail_once(places: Any, ids: Any, mix: Any = None) -> Tensor:
        if len(places) == 2 and len(failures) < 3:
            failures.append(ids)
            raise RuntimeError("no memory")
        return decode(places, ids, mix)

    monkeypatch.setattr(engine._stepper._runner, "decode", fail_once)
    for generation, (tokens, rows, scalings) in zip(running, alone, strict=True):
        deltas = list(generation)
        assert [d.token_id for d in deltas] == tokens
        assert torch.equal(_rows([d.logprobs for d in deltas]), rows)
        assert generation.scalings is not None
        assert torch.equal(generation.scalings, scalings)
    assert len(failures) == 3


def test_equal_prompts_share_nothing(layered: tuple[Any, Path], base: Path) -> None:
    """Neither pass reuses a cache: a second run computes the same."""
    engine = Engine(load(base, xlora=layered[1]))
    first, second = (generated(engine, request(IDS)) for _ in range(2))
    assert engine.stats().cached_tokens == 0
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("freeze", [0, 1, 5])
@pytest.mark.parametrize("lookup", [0, 8])
def test_freezing_keeps_the_last_scalings(
    layered: tuple[Any, Path], base: Path, freeze: int, lookup: int
) -> None:
    """What PEFT computes where its classifier is asked no more."""
    model, folder = layered
    loaded = load(base, xlora=folder, xlora_freeze=freeze)
    prompt = [*IDS[:7], *IDS[:7], *IDS[:5]]
    engine = Engine(loaded, EngineOptions(lookup=lookup))
    tokens, found, acted = generated(engine, request(prompt, 30))
    weighed = len(prompt) + freeze
    classifier = model.base_model.internal_xlora_classifier
    ids, forward = [*prompt, *tokens[:-1]], classifier.forward

    def frozen(*args: Any, **kwargs: Any) -> Tensor:
        scalings: Tensor = forward(*args, **kwargs)
        scalings[:, weighed:] = scalings[:, weighed - 1 : weighed]
        return scalings

    classifier.forward = frozen
    try:
        logits, scalings = making_xlora.computed(model, ids)
    finally:
        classifier.forward = forward
    close(acted, scalings)
    same(found, logits[len(prompt) - 1 :])
    assert torch.equal(acted[-1], acted[weighed - 1])


def test_freezing_skips_the_first_pass(
    layered: tuple[Any, Path], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load(base, xlora=layered[1], xlora_freeze=3), EngineOptions(lookup=0))
    runner, passes = engine._stepper._runner, []
    step = runner.step

    def counted(places: Any, ids: Any, mix: Any = None) -> Tensor:
        passes.append(ids)
        return step(places, ids, mix)

    monkeypatch.setattr(runner, "step", counted)
    generated(engine, request(IDS, 12))
    assert len(passes) == 3


@pytest.mark.parametrize("quant", ["8", "4-g32"])
def test_over_a_quantized_base(tmp_path: Path, folders: list[Path], base: Path, quant: str) -> None:
    """As PEFT computes with the same weights, written out."""
    plain = load(base, quant=quant, exact=True)
    state = {n: v.float().clone() for n, v in making.weights_of(plain).items() if n != "lm_head"}
    options: dict[str, Any] = {"layerwise_scalings": True, "xlora_depth": 2}
    model = making_xlora.reference(folders, state, **options)
    folder = making_xlora.write(tmp_path / "it", model, folders, "xlora")
    logits, scalings = making_xlora.computed(model)
    loaded = load(base, quant=quant, exact=True, xlora=folder)
    found, acted = prompt_logprobs(loaded, EngineOptions())
    close(acted, scalings)
    same(found, logits)


def test_without_one_the_model_is_as_before(layered: tuple[Any, Path], base: Path) -> None:
    """Loading an X-LoRA changes no other model, and requests choose no adapters with one."""
    engine = Engine(load(base, xlora=layered[1]))
    with pytest.raises(BadRequestError, match="X-LoRA"):
        engine.generate(request(IDS, adapter="a"))
    plain = Engine(load(base))
    generation = plain.generate(request(IDS))
    list(generation)
    assert generation.scalings is None


def test_names_are_exact(tmp_path: Path, layered: tuple[Any, Path], base: Path) -> None:
    """`adapter_1` is not `adapter_10`, whatever the folders' order; deeper folders are found."""
    model, source = layered
    folder = shutil.copytree(source, tmp_path / "it")
    (folder / "some" / "where").mkdir(parents=True)
    for old, new in (("8", "10"), ("9", "1"), ("10", "11")):
        (folder / f"adapter_{old}").rename(folder / "some" / "where" / f"x{new}")
    for path in list((folder / "some" / "where").iterdir()):
        path.rename(path.with_name(path.name.replace("x", "adapter_")))
    making_xlora.change(folder, adapters=["adapter_10", "adapter_1", "adapter_11"])
    _, acted = prompt_logprobs(load(base, xlora=folder), EngineOptions())
    close(acted, making_xlora.computed(model)[1])
    (folder / "some" / "where" / "adapter_1").rename(folder / "some" / "where" / "adapter_12")
    with pytest.raises(AdapterError, match="no folder 'adapter_1' with"):
        load(base, xlora=folder)


def test_an_ordering_file_orders(tmp_path: Path, layered: tuple[Any, Path], base: Path) -> None:
    """mistral.rs's: the adapters by `order`, the outputs by `layers`; it may be the path."""
    model, source = layered
    folder = shutil.copytree(source, tmp_path / "it")
    expected = making_xlora.computed(model)[0]
    layers = load(base, xlora=folder).xlora.layers  # type: ignore[union-attr]
    order = ["adapter_8", "adapter_9", "adapter_10"]
    reordered = [*layers[6:], *layers[:6]]
    place = torch.tensor([layers.index(path) for path in reordered])

    def move(tensors: dict[str, Tensor]) -> None:
        for name in ("last.weight", "last.bias"):
            grouped = tensors[name].unflatten(0, (len(layers), COUNT))
            tensors[name] = grouped[place].flatten(0, 1).contiguous()

    making.change_tensors(folder, move, CLASSIFIER)
    making_xlora.change(folder, adapters=...)
    numbers = {path: number for number, path in enumerate(reordered)}
    path = folder / "my-ordering.json"
    tiny.write_json(path, {"order": order, "layers": numbers, "base_model_id": "base"})
    for given in (folder, path):
        found, _ = prompt_logprobs(load(base, xlora=given), EngineOptions())
        same(found, expected)
    numbers["model.layers.7.mlp.c_fc"] = len(numbers)
    tiny.write_json(path, {"order": [*order, "adapter_1"], "layers": numbers})
    with pytest.raises(AdapterError, match="no folder 'adapter_1'"):
        load(base, xlora=folder)
    tiny.write_json(path, {"order": order, "layers": numbers})
    with pytest.raises(AdapterError, match=r"not in both: model\.layers\.7\.mlp\.c_fc"):
        load(base, xlora=folder)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_incomplete_save_of_peft_is_refused(
    tmp_path: Path, folders: list[Path], base: Path, depth: int
) -> None:
    """PEFT 0.21.2 leaves tensors out: all that are missing are named, none is made up."""
    model = making_xlora.reference(folders, xlora_depth=depth)
    with pytest.raises(AdapterError) as caught:
        load(base, xlora=making.save(model, tmp_path / "save"))
    message = str(caught.value)
    assert "the classifier lacks layers.0.weight, layers.0.bias" in message
    assert "adapter '0'" in message
    assert "model.layers.1.self_attn.q_proj.lora_A.weight" in message


def test_all_problems_are_told_at_once(
    tmp_path: Path, layered: tuple[Any, Path], base: Path
) -> None:
    folder = shutil.copytree(layered[1], tmp_path / "it")
    making_xlora.change(
        folder,
        top_k_lora=9,
        softmax_temperature=0,
        hidden_size=32,
        use_mean_pool=True,
        layerwise_scalings="yes",
    )

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["inner.0.bias"][0] = torch.nan
        tensors["inner.1.weight"] = tensors.pop("inner.0.weight")

    making.change_tensors(folder, damage, CLASSIFIER)
    making.change_tensors(folder / "adapter_8", lambda t: t.pop(next(iter(t))))
    with pytest.raises(AdapterError) as caught:
        load(base, xlora=folder)
    message = str(caught.value)
    for fact in (
        "top_k_lora is 9",
        "softmax_temperature is 0.0 (expected above 0)",
        "hidden_size is 32 (expected 64",
        "use_mean_pool is True",
        "layerwise_scalings is 'yes'",
        "adapter 'adapter_8'",
        "lacks inner.0.weight",
        "has inner.1.weight",
        "inner.0.bias has values that are not finite",
    ):
        assert fact in message, fact


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "all"}, {"lora_bias": True}])
def test_what_cannot_be_weighed_is_refused(
    tmp_path: Path, layered: tuple[Any, Path], base: Path, options: dict[str, Any]
) -> None:
    folder = shutil.copytree(layered[1], tmp_path / "it")
    shutil.rmtree(folder / "adapter_9")
    making.peft_folder(folder / "adapter_9", 1, r=3, **options)
    with pytest.raises(AdapterError, match=r"adapter 'adapter_9'.*X-LoRA cannot weigh"):
        load(base, xlora=folder)
    shutil.rmtree(folder / "adapter_9")
    making.peft_folder(folder / "adapter_9", 1, r=3, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(AdapterError, match=r"embed_tokens is an embedding"):
        load(base, xlora=folder)


def test_a_classifier_of_the_wrong_size(
    tmp_path: Path, layered: tuple[Any, Path], base: Path
) -> None:
    """Layer-wise or not, the size, the depth: its tensors must be what the config says."""
    for changes, fact in (
        ({"layerwise_scalings": False}, r"last.weight is \[36, 16\] \(expected \[3, 16\]"),
        ({"xlora_size": ...}, r"inner.0.weight is \[16, 64\] \(expected \[2048, 64\]"),
        ({"xlora_depth": 1}, r"has inner.0.bias, inner.0.weight \(expected"),
        ({"xlora_depth": 3}, r"lacks inner.3.weight, inner.3.bias"),
        ({"use_bias": False}, r"has inner.0.bias, last.bias"),
        ({"enable_relu_and_dropout": False, "xlora_depth": 3}, r"lacks inner.1.weight"),
    ):
        folder = shutil.copytree(layered[1], tmp_path / str(len(str(changes))))
        making_xlora.change(folder, **changes)
        with pytest.raises(AdapterError, match=fact):
            load(base, xlora=folder)
        shutil.rmtree(folder)


def test_without_bias_and_relu(tmp_path: Path, layered: tuple[Any, Path], base: Path) -> None:
    """What EricLBuehler/xlora alone has: products and nothing between them."""
    model, source = layered
    folder = shutil.copytree(source, tmp_path / "it")

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["inner.0.bias"], tensors["last.bias"]

    making.change_tensors(folder, drop, CLASSIFIER)
    making_xlora.change(folder, enable_relu_and_dropout=False)
    classifier = model.base_model.internal_xlora_classifier.layers
    kept, biases = classifier[1], [classifier[at].bias.data.clone() for at in (0, 3)]
    try:
        classifier[1] = torch.nn.Identity()
        for at in (0, 3):
            classifier[at].bias.data.zero_()
        logits, scalings = making_xlora.computed(model)
    finally:
        classifier[1] = kept
        for at, bias in zip((0, 3), biases, strict=True):
            classifier[at].bias.data.copy_(bias)
    found, acted = prompt_logprobs(load(base, xlora=folder), EngineOptions())
    close(acted, scalings)
    same(found, logits)


def test_a_head_may_carry_adapters(tmp_path: Path, base: Path) -> None:
    """PEFT cannot load it. One adapter alone weighs 1 after softmax: the same as plain LoRA."""
    targets = ["q_proj", "lm_head"]
    model = making.peft_model(None, 3, {"r": 2, "target_modules": targets})
    making.save(model, tmp_path / "it" / "only")
    config = {"adapters": ["only"], "layerwise_scalings": True, "use_bias": False}
    tiny.write_json(tmp_path / "it" / "xlora_config.json", config)
    save_file({"last.weight": torch.randn(3, 64)}, tmp_path / "it" / CLASSIFIER)
    loaded = load(base, xlora=tmp_path / "it")
    assert loaded.xlora is not None
    assert loaded.xlora.layers[-1] == "lm_head"
    found, acted = prompt_logprobs(loaded, EngineOptions(prefill_chunk=7))
    assert torch.equal(acted, torch.ones(len(IDS), 3, 1))
    tokens, written, _ = generated(Engine(loaded), request(IDS))
    with torch.inference_mode():
        logits = model(torch.tensor([[*IDS, *tokens[:-1]]])).logits[0]
    same(found, logits[: len(IDS)])
    same(written, logits[len(IDS) - 1 :])
    # Without softmax it differs from token to token. A prompt's last token has a way of its own.
    making_xlora.change(tmp_path / "it", enable_softmax=False)
    engine = Engine(load(base, xlora=tmp_path / "it"))
    (whole,) = list(engine.generate(request(IDS, 1, prompt_logprobs=MOST)))
    (first,) = list(engine.generate(request(IDS[:10], 1)))
    assert whole.prompt_logprobs is not None
    assert first.logprobs is not None
    top = [one.logprob for one in first.logprobs.top]
    expected = whole.prompt_logprobs[10]
    assert expected is not None
    assert top == pytest.approx([one.logprob for one in expected.top], abs=1e-4)


def test_paths_that_are_none(
    tmp_path: Path, folders: list[Path], layered: tuple[Any, Path]
) -> None:
    """Told before a model is looked for."""
    with pytest.raises(AdapterError, match="no X-LoRA at"):
        load("no-such-model", xlora=tmp_path)
    with pytest.raises(AdapterError, match="peft_type 'LORA'"):
        load("no-such-model", xlora=folders[0])
    with pytest.raises(BadRequestError, match="xlora_freeze"):
        load("no-such-model", xlora=layered[1], xlora_freeze=-1)
    with pytest.raises(BadRequestError, match="needs an X-LoRA"):
        load("no-such-model", xlora_freeze=1)


def test_a_pickled_classifier_is_refused(
    tmp_path: Path, layered: tuple[Any, Path], base: Path
) -> None:
    folder = shutil.copytree(layered[1], tmp_path / "it")
    (folder / CLASSIFIER).rename(folder / "xlora_classifier.pt")
    with pytest.raises((AdapterError, UnsupportedError), match="pickle"):
        load(base, xlora=folder)
