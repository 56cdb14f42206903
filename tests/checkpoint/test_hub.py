"""Hub models: small files first, weights only when they are needed, headers alone to inspect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from starquill.checkpoint.describe import describe
from starquill.checkpoint.source import read_header
from starquill.errors import UnsupportedError
from starquill.loading import load
from tests import tiny

WEIGHTS = "model.safetensors"


class Hub:
    """A hub with one repository; a download brings the files that match the patterns."""

    def __init__(self, served: Path, cache: Path) -> None:
        self.served, self.cache = served, cache
        self.downloaded: list[str] = []
        cache.mkdir()

    def snapshot_download(self, repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert repository == "owner/name"
        for path in self.served.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copyfile(path, self.cache / path.name)
                self.downloaded.append(path.name)
        return str(self.cache)

    def get_safetensors_metadata(self, repository: str, **_: Any) -> Any:
        assert repository == "owner/name"
        tensors = {
            name: SimpleNamespace(dtype=location.info.dtype, shape=list(location.info.shape))
            for name, location in read_header(self.served / WEIGHTS).items()
        }
        return SimpleNamespace(files_metadata={WEIGHTS: SimpleNamespace(tensors=tensors)})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tiny.write_checkpoint(tmp_path / "served"), tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", hub.get_safetensors_metadata)
    return hub


def test_inspecting_downloads_no_weights(hub: Hub) -> None:
    facts = describe("owner/name")
    assert WEIGHTS not in hub.downloaded
    local = describe(hub.served)
    assert (facts.bytes, facts.dtypes) == (local.bytes, local.dtypes)
    assert (facts.parameters, facts.warnings) == (local.parameters, ())


def test_loading_downloads_the_weights(hub: Hub) -> None:
    loaded = load("owner/name")
    assert hub.downloaded.count(WEIGHTS) == 1
    assert loaded.name == "owner/name"


def test_a_model_that_cannot_run_is_refused_before_its_weights(hub: Hub) -> None:
    (hub.served / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match="'mamba'"):
        load("owner/name")
    assert WEIGHTS not in hub.downloaded


def test_a_repository_of_pickles_is_refused(hub: Hub) -> None:
    (hub.served / WEIGHTS).rename(hub.served / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"owner/name has no \.safetensors files"):
        load("owner/name")
    assert "pytorch_model.bin" not in hub.downloaded
