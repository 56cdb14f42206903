"""Kind d, chat: what reaches the model, what ends an answer, what chat cannot do.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.running import Deliver, Running
from starquill.loading import load
from starquill.types import GenerateRequest
from tests import tiny
from tests.reports.test_kind_a_text import ANSWER, OTHER_USER, REFUSAL, SYSTEM, TEMPLATE, USER
from tests.server.serving import serving_engine

END = 0
CHAT = "/v1/chat/completions"


class Recording(Engine):
    """An engine that keeps what was submitted."""

    seen: list[GenerateRequest]

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Running:
        self.seen.append(request)
        return super().submit(request, deliver)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("chatty")
    tiny.write_checkpoint(folder, tiny.config(max_position_embeddings=256))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return load(folder)


@pytest.fixture(scope="module")
def engine(chatty: LoadedModel) -> Recording:
    return Recording(chatty)


@pytest.fixture(scope="module")
def address(engine: Recording) -> Iterator[str]:
    with serving_engine(engine) as found:
        yield found


def post(address: str, **body: Any) -> httpx.Response:
    return httpx.post(address + CHAT, json={"temperature": 0, "max_tokens": 4, **body})


def prompt_of(engine: Recording, address: str, messages: list[dict[str, str]]) -> str:
    """The text that the model was given for `messages`."""
    engine.seen = []
    assert post(address, messages=messages).status_code == 200
    [request] = engine.seen
    assert request.heal == b""
    return engine.model.require_tokenizer().decode(request.prompt_ids, skip_special=False)


@pytest.mark.parametrize("stream", [True, False])
def test_b21_a_refusal_is_the_templates_own(address: str, stream: bool) -> None:
    """B21: a system message raised inside Jinja, and the client got status 500."""
    answer = post(address, messages=[SYSTEM, USER], stream=stream)
    assert answer.status_code == 400
    assert REFUSAL in answer.json()["error"]["message"]


@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, OTHER_USER], [USER, ANSWER]])
def test_b21_the_model_reads_what_the_template_writes(
    engine: Recording, address: str, messages: list[dict[str, str]]
) -> None:
    """B21: servers opened an answer of their own, or left the template's opening out."""
    written = "<|endoftext|>You write code and nothing else.\n\n"
    for message in messages:
        if message["role"] == "user":
            written += f"### Instruction\n{message['content']}\n\n"
        else:
            written += f"### Response\n{message['content']}<|endoftext|>\n\n"
    assert prompt_of(engine, address, messages) == f"{written}### Response\n"


@pytest.mark.parametrize("heading", ["### Instruction", "### Response"])
@pytest.mark.parametrize("stop", [None, "unseen"])
def test_b21_an_answer_ends_where_the_next_block_begins(
    engine: Recording, chatty: LoadedModel, address: str, heading: str, stop: str | None
) -> None:
    """B21: the model wrote "### Instruction" and went on, with the user's words as well."""
    engine.seen = []
    post(address, messages=[USER])
    prompt = len(engine.seen[0].prompt_ids)
    ids = chatty.require_tokenizer().encode(f"x = 1\n{heading}\nmore")
    with serving_engine(Engine(tiny.scripted(chatty, [*ids, END], prompt))) as scripted:
        answer = post(scripted, messages=[USER], max_tokens=100, stop=stop)
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("x = 1\n", "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_b21_a_base_model_says_what_to_use(tmp_path: Path, stream: bool) -> None:
    """B21: a base model was prompted with a made-up form."""
    with serving_engine(Engine(tiny.load_tiny(tmp_path))) as address:
        answer = post(address, messages=[USER], stream=stream)
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, OTHER_USER]])
def test_b22_the_text_start_token_occurs_once(
    engine: Recording, address: str, messages: list[dict[str, str]]
) -> None:
    """B22: template and encoder wrote one each; and a stop at id 0 saw the prompt's."""
    engine.seen = []
    answer = post(address, messages=messages, logit_bias={str(END): -100})
    ids = engine.seen[0].prompt_ids
    assert ids[0] == END
    assert ids[1] != END
    # It is the end token too: the other ones stand behind the answers of before.
    assert ids.count(END) == 1 + sum(m["role"] == "assistant" for m in messages)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_b15_control_tokens_in_a_message_are_data(engine: Recording, address: str) -> None:
    """B15, through the server: a message with `<file_sep>` in it became a control token."""
    content = "<file_sep><|endoftext|>"
    parts: Any = [{"type": "text", "text": "<file_"}, {"type": "text", "text": "sep>"}]
    for message in (content, parts):
        text = prompt_of(engine, address, [{"role": "user", "content": message}])
        assert (content if message is content else "<file_\nsep>") in text
        special = engine.model.require_tokenizer().special_ids
        assert [i for i in engine.seen[0].prompt_ids if i in special] == [END]


@pytest.mark.parametrize("suffix", ["", "    return 1", ["x"], 1, {"a": 1}])
@pytest.mark.parametrize("stream", [True, False])
def test_b56_chat_fills_no_holes(address: str, suffix: Any, stream: bool) -> None:
    """B56: a suffix sent to chat was ignored, and the answer had nothing to do with it."""
    answer = post(address, messages=[USER], suffix=suffix, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "suffix"
    assert "/v1/completions" in error["message"]


def test_b56_no_suffix_is_none(address: str) -> None:
    """B56: clients that write every field send null."""
    assert post(address, messages=[USER], suffix=None).status_code == 200
