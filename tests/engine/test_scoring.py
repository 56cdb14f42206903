"""Scores against transformers' log probabilities, over windows, and of a model with itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.engine import scoring
from starquill.engine.loaded import LoadedModel
from starquill.engine.scoring import Score, log_probabilities, score_texts
from starquill.errors import BadRequestError, StarquillError
from starquill.loading import load
from tests import tiny

TEXT = "def f(x):\n    return x + 2024  # é😀\n"
LONG = TEXT * 6


def _load(folder: Path, seed: int = 0, quant: str | None = None, **changes: Any) -> LoadedModel:
    raw = tiny.config(**changes)
    return load(tiny.write_checkpoint(folder, raw, tiny.weights(raw, seed=seed)), quant=quant)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load(tmp_path_factory.mktemp("model"), max_position_embeddings=2000)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load(tmp_path_factory.mktemp("other"), seed=3, max_position_embeddings=2000)


def _ids(loaded: LoadedModel, text: str) -> list[int]:
    """The text after the end-of-text token, which is what training put before it."""
    return [0, *loaded.require_tokenizer().encode(text)]


def _reference(ids: Sequence[int], seed: int = 0, **changes: Any) -> Tensor:
    """log p `[len(ids), V]` of each next token, by transformers in float64."""
    raw = tiny.config(max_position_embeddings=2000, **changes)
    logits = tiny.reference_logits(raw, tiny.weights(raw, seed=seed), ids)
    return logits.double().log_softmax(-1)


def _nats(logp: Tensor, ids: Sequence[int], start: int = 1) -> float:
    """-log p of `ids[start:]`, row i of `logp` being about token i+1."""
    rows = torch.arange(start - 1, len(ids) - 1)
    return -float(logp[rows, torch.tensor(ids[start:])].sum())


@pytest.mark.parametrize("chunk", [1, 3, 7, 256])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
def test_log_probabilities_are_transformers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, chunk: int, length: int
) -> None:
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    ids = tiny.random_ids(length)
    ours = torch.cat(list(log_probabilities(model, ids)))
    torch.testing.assert_close(ours.double(), _reference(ids), rtol=0, atol=1e-4)


def test_a_text_is_scored_from_its_start(model: LoadedModel) -> None:
    ids = _ids(model, TEXT)
    score = score_texts(model, [TEXT])
    nats = _nats(_reference(ids), ids)
    assert score.tokens == len(ids) - 1
    assert score.bytes == len(TEXT.encode()) > len(TEXT)
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)
    assert not score.compared


def test_texts_do_not_touch(model: LoadedModel) -> None:
    texts = [TEXT, "x", "", LONG, "２\n"]
    together = score_texts(model, texts)
    alone = [score_texts(model, [text]) for text in texts]
    assert together.nats == pytest.approx(sum(score.nats for score in alone), rel=1e-9)
    assert together.tokens == sum(score.tokens for score in alone)
    assert together.bytes == sum(len(text.encode()) for text in texts)
    assert score_texts(model, iter(texts)) == together


@pytest.mark.parametrize("window", [2, 3, 8, 15, 64])
@pytest.mark.parametrize("chunk", [5, 256])
def test_windows_overlap_by_half(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, window: int, chunk: int
) -> None:
    """Each token once, seeing what its window begins with; first one from the text's start."""
    monkeypatch.setattr(scoring, "WINDOW", window)
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    ids = _ids(model, TEXT)
    expected, done = 0.0, 1
    while done < len(ids):
        first = max(0, done - window // 2)
        piece = ids[first : first + window]
        expected += _nats(_reference(piece), piece, done - first)
        done = first + len(piece)
    score = score_texts(model, [TEXT])
    assert score.tokens == len(ids) - 1
    assert score.nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", [1, 2, 16, 64])
def test_a_text_longer_than_the_context(tmp_path: Path, context: int) -> None:
    """Every token is scored, however short the context, and none past it."""
    loaded = _load(tmp_path, max_position_embeddings=context)
    if context == 1:  # nothing can be predicted from nothing
        with pytest.raises(StarquillError):
            score_texts(loaded, [LONG])
        return
    score = score_texts(loaded, [LONG])
    assert score.tokens == len(_ids(loaded, LONG)) - 1
    assert math.isfinite(score.nats)


def test_a_model_agrees_with_itself(model: LoadedModel) -> None:
    score = score_texts(model, [TEXT, LONG], model)
    assert score.compared
    assert score.kl_divergence == 0
    assert score.top_agreement == 1
    assert score.same_top == score.tokens
    assert score.nats == score_texts(model, [TEXT, LONG]).nats


def test_the_distance_is_from_the_reference(model: LoadedModel, other: LoadedModel) -> None:
    """KL(reference ‖ model), which is not KL(model ‖ reference)."""
    ids = _ids(model, TEXT)
    ours, theirs = _reference(ids)[:-1], _reference(ids, seed=3)[:-1]
    score = score_texts(model, [TEXT], other)
    kl = float((theirs.exp() * (theirs - ours)).sum())
    assert score.kl_nats == pytest.approx(kl, rel=1e-4)
    assert score.kl_divergence == pytest.approx(kl / (len(ids) - 1), rel=1e-4)
    same = (theirs.argmax(1) == ours.argmax(1)).sum()
    assert score.same_top == int(same)
    assert score.nats == pytest.approx(_nats(_reference(ids), ids), rel=1e-5)
    back = score_texts(other, [TEXT], model)
    assert abs(back.kl_nats - score.kl_nats) > 1e-3 * kl


@pytest.mark.parametrize("window", [8, 15])
def test_compared_over_windows(
    model: LoadedModel, other: LoadedModel, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(scoring, "WINDOW", window)
    score = score_texts(model, [TEXT], other)
    assert score.tokens == len(_ids(model, TEXT)) - 1
    assert 0 <= score.same_top <= score.tokens
    assert score.kl_nats > 0
    assert score_texts(model, [TEXT], model).kl_nats == 0


def test_more_bits_are_nearer(tmp_path: Path) -> None:
    """The instrument tells good from bad: KL falls with every bit."""
    plain = _load(tmp_path / "m")
    folder = tmp_path / "m"
    scores = [score_texts(load(folder, quant=str(b)), [LONG], plain) for b in (2, 4, 8)]
    assert scores[0].kl_divergence > 5 * scores[1].kl_divergence
    assert scores[1].kl_divergence > 5 * scores[2].kl_divergence > 0
    assert scores[0].top_agreement < scores[2].top_agreement


def test_another_vocabulary_cannot_be_compared(tmp_path: Path, model: LoadedModel) -> None:
    small = _load(tmp_path, vocab_size=300)
    for one, reference in ((model, small), (small, model)):
        with pytest.raises(BadRequestError, match="320") as caught:
            score_texts(one, [TEXT], reference)
        assert "300" in str(caught.value)


def test_as_many_but_other_tokens_cannot_be_compared(tmp_path: Path, model: LoadedModel) -> None:
    """Equal sizes prove nothing: token 40 of one is not token 40 of the other."""
    definition = tiny.byte_tokenizer()
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    folder = tiny.write_checkpoint(tmp_path, tokenizer=definition)
    with pytest.raises(BadRequestError, match="vocabular"):
        score_texts(model, [TEXT], load(folder))


def test_a_reference_with_a_shorter_context(tmp_path: Path) -> None:
    """Windows fit both models, so that none is asked past what it was made for."""
    long = _load(tmp_path / "l", max_position_embeddings=2000, sliding_window=None)
    short = _load(tmp_path / "s", max_position_embeddings=16, sliding_window=None)
    score, other = score_texts(long, [LONG], short), score_texts(short, [LONG], long)
    assert score.tokens == other.tokens == len(_ids(long, LONG)) - 1
    # The same weights, over the same windows: the same distributions.
    assert score.kl_divergence < 1e-6
    assert score.nats == pytest.approx(other.nats, rel=1e-6)


def test_nothing_to_score(model: LoadedModel) -> None:
    score = score_texts(model, [])
    assert score == Score()
    assert (score.bits_per_byte, score.kl_divergence, score.top_agreement) == (0, 0, 0)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StarquillError, match="tokenizer"):
        score_texts(load(folder), [TEXT])
