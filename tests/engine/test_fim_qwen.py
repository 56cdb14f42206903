"""Qwen-Coder's fills with other files of a repository, as its published example writes them."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.types import ContextFile, Hole, SamplingParams
from tests import moe, tiny

# In the order of the published ids. Qwen does not flag any of them as special but the first.
SPECIAL = (
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
CONTEXT = 96
code = st.text(alphabet="ab \n1é", max_size=30)
FILES = (ContextFile("library.py", "class Book:\n"), ContextFile("d/student.py", "class S: x"))
# QwenLM/Qwen2.5-Coder, examples/Qwen2.5-Coder-repolevel-fim.py: names, paths and files are lines.
EXAMPLE = """<|repo_name|>library-system
<|file_sep|>library.py
class Book:

<|file_sep|>d/student.py
class S: x
<|file_sep|>main.py
<|fim_prefix|>import S
def main():
    # borrow<|fim_suffix|>
    main()<|fim_middle|>"""
HOLE = Hole(
    "import S\ndef main():\n    # borrow", "\n    main()", FILES, "main.py", "library-system"
)


def _definition() -> dict[str, object]:
    definition = tiny.byte_tokenizer(SPECIAL)
    for token in definition["added_tokens"][1:]:
        token["special"] = False
    return definition


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    raw = moe.config("qwen3_moe", max_position_embeddings=4 * CONTEXT)
    folder = moe.write(tmp_path_factory.mktemp("qwen"), raw, moe.reference(raw))
    tiny.write_json(folder / "tokenizer.json", _definition())
    return load(folder)


def _ids(text: str) -> list[int]:
    made = tokenizers.Tokenizer.from_str(json.dumps(_definition()))
    return list(made.encode(text, add_special_tokens=False).ids)


def test_the_published_form(loaded: LoadedModel) -> None:
    request, trimmed = fill_request(loaded, HOLE, SamplingParams(max_tokens=8))
    assert not trimmed
    assert list(request.prompt_ids) == _ids(EXAMPLE)
    assert request.stop_ids == frozenset(range(1, 7))


def test_without_other_files_no_path_is_written(loaded: LoadedModel) -> None:
    request, _ = fill_request(loaded, Hole("a", "b", path="m.py"), SamplingParams(max_tokens=8))
    assert list(request.prompt_ids) == _ids("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")


def test_suffix_first(loaded: LoadedModel) -> None:
    """The path stays with the repository, since it is no part of the prefix."""
    request, _ = fill_request(loaded, HOLE, SamplingParams(max_tokens=8), order="spm")
    front, _, _ = EXAMPLE.partition("<|fim_prefix|>")
    told = f"{front}<|fim_prefix|><|fim_suffix|>{HOLE.suffix}<|fim_middle|>{HOLE.prefix}"
    assert list(request.prompt_ids) == _ids(told)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(code, code, st.lists(st.builds(ContextFile, st.just("f.py"), code), max_size=3))
def test_what_is_kept_fits(
    loaded: LoadedModel, prefix: str, suffix: str, files: list[ContextFile]
) -> None:
    """Files are left out before code, the first named first, and only where there is no room."""
    hole = Hole(prefix, suffix, tuple(files), "dir/m.py", "r")
    params = SamplingParams(max_tokens=8)
    request, trimmed = fill_request(loaded, hole, params, context=CONTEXT)
    assert len(request.prompt_ids) + 8 <= CONTEXT
    kept = files[len(trimmed.files) :]
    if kept:
        assert not trimmed.prefix_tokens + trimmed.suffix_tokens
        front = "".join(f"<|file_sep|>f.py\n{file.code}\n" for file in kept)
        front = f"<|repo_name|>r\n{front}<|file_sep|>dir/m.py\n"
    else:
        front = ""
    if not trimmed.prefix_tokens + trimmed.suffix_tokens:
        told = f"{front}<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
        assert list(request.prompt_ids) == _ids(told)
    if trimmed.files:
        one_more = Hole(prefix, suffix, tuple(files[len(trimmed.files) - 1 :]), "dir/m.py", "r")
        whole, _ = fill_request(loaded, one_more, params)
        assert len(whole.prompt_ids) + 8 > CONTEXT


def test_names_and_files_are_data(loaded: LoadedModel) -> None:
    files = (ContextFile("<|fim_suffix|>", "<|file_sep|>"),)
    hole = Hole("<|fim_middle|>", "", files, "<|fim_pad|>", "<|repo_name|>")
    request, _ = fill_request(loaded, hole, SamplingParams(max_tokens=0))
    assert [i for i in request.prompt_ids if i < len(SPECIAL)] == [5, 6, 6, 1, 3, 2]
