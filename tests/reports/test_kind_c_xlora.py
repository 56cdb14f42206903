"""Kind c, X-LoRA: scalings from the wrong pass, with the wrong size, or of another request.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.engine.engine import Engine
from starquill.errors import AdapterError
from starquill.loading import load
from starquill.types import EngineOptions
from tests import tiny
from tests.adapters import making, making_xlora
from tests.adapters.test_xlora import IDS, close, generated, request, same


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_b45_scalings_come_from_a_pass_of_their_own(
    tmp_path: Path, depth: int, layerwise: bool
) -> None:
    """B45: caching was refused or used one cache for two passes, and requests shared scalings.

    Temperature 0.5, weight 2, one adapter of three, two requests at once, each token by token with
    caches: as computed without any.
    """
    folders = making_xlora.adapters(tmp_path / "experts")
    options: dict[str, Any] = {
        "xlora_depth": depth,
        "layerwise_scalings": layerwise,
        "softmax_temperature": 0.5,
        "global_scaling_weight": 2.0,
        "top_k_lora": 1,
    }
    model = making_xlora.reference(folders, **options)
    folder = making_xlora.write(tmp_path / "it", model, folders, "xlora")
    loaded = load(tiny.write_checkpoint(tmp_path / "base"), xlora=folder)
    prompts = [IDS, tiny.random_ids(9, seed=4)]
    engine = Engine(loaded, EngineOptions(prefill_chunk=8))
    running = [engine.generate(request(ids)) for ids in prompts]
    for ids, generation in zip(prompts, running, strict=True):
        tokens = [d.token_id or 0 for d in generation]
        logits, scalings = making_xlora.computed(model, [*ids, *tokens[:-1]])
        assert tokens == logits[len(ids) - 1 :, 1:].argmax(-1).add(1).tolist()
        assert generation.scalings is not None
        close(generation.scalings, scalings)
        assert bool(((generation.scalings != 0).sum(-1) == 1).all())


def test_b45_the_size_is_2048_unless_said(tmp_path: Path) -> None:
    """B45: a config without xlora_size was read as one with size 1."""
    folders = making_xlora.adapters(tmp_path / "experts")
    model = making_xlora.reference(folders, xlora_depth=2, xlora_size=2048)
    folder = making_xlora.write(tmp_path / "it", model, folders, "xlora")
    making_xlora.change(folder, xlora_size=...)
    loaded = load(tiny.write_checkpoint(tmp_path / "base"), xlora=folder)
    tokens, found, acted = generated(Engine(loaded), request(IDS))
    logits, scalings = making_xlora.computed(model, [*IDS, *tokens[:-1]])
    close(acted, scalings)
    same(found, logits[len(IDS) - 1 :])


def test_b45_nothing_is_random(tmp_path: Path) -> None:
    """B45: dropout acted at inference, and tensors that a save lacked were made up."""
    folders = making_xlora.adapters(tmp_path / "experts")
    model = making_xlora.reference(folders, xlora_depth=3, xlora_dropout_p=0.9)
    folder = making_xlora.write(tmp_path / "it", model, folders, "peft")
    base = tiny.write_checkpoint(tmp_path / "base")
    first, second = (generated(Engine(load(base, xlora=folder)), request(IDS)) for _ in range(2))
    assert torch.equal(first[1], second[1])
    close(first[2][: len(IDS)], making_xlora.computed(model)[1])
    making.change_tensors(folder, lambda t: t.pop(next(n for n in t if "layers.3.bias" in n)))
    with pytest.raises(AdapterError, match=r"the classifier lacks layers\.3\.bias"):
        load(base, xlora=folder)
