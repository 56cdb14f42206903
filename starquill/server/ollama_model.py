"""What Ollama's routes tell of the model that is served."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from starquill.engine.loaded import LoadedModel
from starquill.nn.linear import Embedding, Linear

FOREVER = datetime.max.replace(microsecond=0, tzinfo=UTC).isoformat()


def card(loaded: LoadedModel, name: str) -> dict[str, Any]:
    """The model in a list of models.

    Its size is that in memory. Its digest is of what it is made of: the names, shapes and schemes
    of its matrices, not their values.
    """
    weights = _weights(loaded)
    made_of = [
        loaded.spec.model_type,
        *((n, w.shape, w.scheme) for n, w in sorted(weights.items())),
    ]
    parameters = list(loaded.model.parameters())
    size = sum(weight.nbytes for weight in _distinct(weights))
    return {
        "name": name,
        "model": name,
        "modified_at": _changed(loaded),
        "size": size + sum(p.numel() * p.element_size() for p in parameters),
        "digest": hashlib.sha256(json.dumps(made_of).encode()).hexdigest(),
        "details": details(loaded),
    }


def running(loaded: LoadedModel, name: str, context: int) -> dict[str, Any]:
    """The model in a list of models that are loaded; this one stays."""
    known = card(loaded, name)
    del known["modified_at"]
    return {**known, "expires_at": FOREVER, "size_vram": 0, "context_length": context}


def shown(loaded: LoadedModel, context: int) -> dict[str, Any]:
    """All about the model. Continue reads from `template` whether it fills holes."""
    architecture = loaded.spec.model_type
    return {
        "modified_at": _changed(loaded),
        "template": _template(loaded),
        "parameters": f"num_ctx {context}",
        "details": details(loaded),
        "model_info": {
            "general.architecture": architecture,
            "general.parameter_count": _parameters(loaded),
            f"{architecture}.context_length": loaded.config.context_length,
            f"{architecture}.block_count": loaded.config.num_hidden_layers,
            f"{architecture}.embedding_length": loaded.config.hidden_size,
        },
        "capabilities": ["completion", *(["insert"] if _fills(loaded) else [])],
    }


def details(loaded: LoadedModel) -> dict[str, Any]:
    family = loaded.spec.model_type
    schemes = Counter(weight.scheme for weight in _distinct(_weights(loaded)))
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _in_words(_parameters(loaded)),
        "quantization_level": schemes.most_common(1)[0][0],
    }


def _template(loaded: LoadedModel) -> str:
    if not _fills(loaded):
        return "{{ .Prompt }}"
    tokenizer, fim = loaded.require_tokenizer(), loaded.require_fim()
    prefix, suffix, middle = (tokenizer.added[i] for i in (fim.prefix, fim.suffix, fim.middle))
    hole = f"{prefix}{{{{ .Prompt }}}}{suffix}{{{{ .Suffix }}}}{middle}"
    return f"{{{{ if .Suffix }}}}{hole}{{{{ else }}}}{{{{ .Prompt }}}}{{{{ end }}}}"


def _fills(loaded: LoadedModel) -> bool:
    return loaded.tokenizer is not None and loaded.tokenizer.fim is not None


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    named = loaded.model.named_modules()
    return {name: m.weight for name, m in named if isinstance(m, Linear | Embedding)}


def _distinct(weights: dict[str, Any]) -> list[Any]:
    """A tied one counts once."""
    return list({id(weight): weight for weight in weights.values()}.values())


def _parameters(loaded: LoadedModel) -> int:
    matrices = sum(math.prod(weight.shape) for weight in _distinct(_weights(loaded)))
    return matrices + sum(p.numel() for p in loaded.model.parameters())


def _in_words(count: int) -> str:
    """As 3.0B, 5.7M or 12.3K."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return f"{count / 1000:.1f}K"


def _changed(loaded: LoadedModel) -> str:
    return datetime.fromtimestamp(loaded.folder.stat().st_mtime, UTC).isoformat()
