"""`starquill generate`: what is printed where, in a pipe, on a terminal and when interrupted."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import tty
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.cli.app import main
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.models.spec import StepBatch
from starquill.types import SamplingParams
from tests import tiny

ANSI = re.compile(r"\x1b\[[0-9;]*m")
END = 0
PROMPT = "def f"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    raw = tiny.config(max_position_embeddings=200_000)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), raw)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


def options(folder: Path, *more: str, count: int = 12) -> list[str]:
    return ["generate", "-m", str(folder), "-n", str(count), "--logit-bias", f"{END}=-100", *more]


def expected_text(loaded: LoadedModel, prompt: str = PROMPT, count: int = 12, **more: Any) -> str:
    params = SamplingParams(max_tokens=count, logit_bias={END: -100.0}, **more)
    return Engine(loaded).complete(prompt, params)


def use(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> None:
    monkeypatch.setattr("starquill.cli.run.load", lambda *_, **__: model)


def writing(loaded: LoadedModel, data: bytes, prompt: int = 1) -> LoadedModel:
    """A model that writes `data`, a byte a token, after a prompt of `prompt` tokens."""
    table = loaded.require_tokenizer().token_bytes
    return tiny.scripted(loaded, [*(table.index(bytes([b])) for b in data), END], prompt)


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# --- into a pipe ---


def test_text_and_nothing_else(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder, "-p", PROMPT)) == 0
    assert capsys.readouterr() == (expected_text(loaded), "")


@pytest.mark.parametrize("data", ["def f\n", "a\r\n\tb", "a\0b", "é😀", "-", " ", "\n"])
def test_standard_input_is_read_exactly(
    folder: Path, loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    give_stdin(monkeypatch, data.encode())
    assert main(options(folder, "--prompt", "-")) == 0
    assert capsys.readouterr().out == expected_text(loaded, data)


def test_an_empty_prompt_is_completed(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder, "-p", "")) == 0
    assert capsys.readouterr().out == expected_text(loaded, "")


def test_no_tokens(folder: Path, capsys: Capture) -> None:
    assert main(options(folder, "-p", PROMPT, count=0)) == 0
    assert capsys.readouterr() == ("", "")


def test_a_weight_file_is_a_model_too(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder / "model.safetensors", "-p", PROMPT)) == 0
    assert capsys.readouterr().out == expected_text(loaded)


def test_a_pipe_gets_the_bytes_unchanged(
    loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, writing(loaded, b"\x1b[2J\r\n\ta\x07\0b"))
    assert main(["generate", "-p", "x"]) == 0
    assert capsys.readouterr().out == "\x1b[2J\r\n\ta\x07\0b"


def test_options_reach_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []

    class Done:
        exit_code = 0

    def record(_loaded: Any, request: Any, *_: Any, **__: Any) -> Done:
        seen.append(request.params)
        return Done()

    monkeypatch.setattr("starquill.cli.run.run", record)
    words = (
        "--max-tokens 9 --temp 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 7 --stop a --stop b "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty -0.3 "
        "--logit-bias 5=-1.5 --logit-bias 6=2 --logprobs 3"
    )
    assert main(["generate", "-m", str(folder), "-p", "x", *words.split()]) == 0
    assert seen == [
        SamplingParams(
            9, 0.5, 0.9, 4, 0.1, 7, ("a", "b"), 1.1, 0.2, -0.3, {5: -1.5, 6: 2.0}, 3
        )
    ]  # fmt: skip


def test_the_default_is_greedy(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    main(["generate", "-m", str(folder), "-p", PROMPT, "-n", "5"])
    first = capsys.readouterr().out
    main(["generate", "-m", str(folder), "-p", PROMPT, "-n", "5", "--temp", "0", "--seed", "9"])
    assert capsys.readouterr().out == first == Engine(loaded).complete(PROMPT, SamplingParams(5))


def test_a_seed_repeats(folder: Path, capsys: Capture) -> None:
    texts = []
    for seed in ("1", "1", "2", "-1"):
        assert main(options(folder, "-p", PROMPT, "--temp", "2", "--seed", seed)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_stop_strings(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    whole = expected_text(loaded, count=40)
    stop = next(c for c in whole[3:] if c not in whole[:3] + "\ufffd")
    assert main(options(folder, "-p", PROMPT, "--stop", "", "--stop", stop, count=40)) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)]


def test_special_text_in_the_prompt(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    prompt = "<fim_prefix>a<fim_suffix>b<fim_middle>"
    texts = []
    for more in ([], ["--no-parse-special"], ["--no-heal"], ["--no-heal", "--no-parse-special"]):
        assert main(options(folder, "-p", prompt, *more)) == 0
        texts.append(capsys.readouterr().out)
    # A control token at the end is not taken back, so healing changes nothing there.
    assert texts[0] == texts[2] == expected_text(loaded, prompt)
    assert texts[1] != texts[0] != texts[3]


def test_no_heal(loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    space, two = (loaded.require_tokenizer().id_of(t) for t in ("Ġ", "ĠĠ"))
    assert space is not None
    assert two is not None
    healing = tiny.scripted(loaded, [two, END], 1)
    for model, more in ((healing, []), (writing(loaded, b" ", 2), ["--no-heal"])):
        use(monkeypatch, model)
        assert main(["generate", "-p", "x ", *more]) == 0
        assert capsys.readouterr().out == " "
    use(monkeypatch, tiny.scripted(loaded, [space, END], 1))
    assert main(["generate", "-p", "x "]) == 0
    assert capsys.readouterr().out == ""


def test_chat(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert main(options(folder, "-p", "hi", "--chat")) == 0
    params = SamplingParams(max_tokens=12, logit_bias={END: -100.0})
    rendered = "<|endoftext|>[user]hi:"
    assert capsys.readouterr().out == Engine(load(folder)).complete(rendered, params, heal=False)


# --- reports ---


def test_json_is_one_object(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder, "-p", PROMPT, "--json", "--logprobs", "2", "--stats")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert out.endswith("\n")
    result = json.loads(out)
    assert set(result) == {"text", "finish_reason", "tokens", "stats"}
    assert result["text"] == expected_text(loaded)
    assert result["finish_reason"] == "length"
    tokenizer = loaded.require_tokenizer()
    for token in result["tokens"]:
        assert token["text"] == tokenizer.decode([token["id"]], skip_special=False)
        assert token["logprob"] < 0
        assert len(token["top"]) == 2
        assert token["top"][0]["logprob"] >= token["top"][1]["logprob"]
    stats = result["stats"]
    assert stats["generated_tokens"] == len(result["tokens"])
    assert stats["peak_memory_bytes"] > 10_000_000
    assert stats["seed"] is None
    assert stats["time_to_first_token_seconds"] > 0


def test_json_shows_control_tokens_among_the_tokens_alone(
    loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiny.scripted(loaded, [7, END], 1))
    assert main(["generate", "-p", "x", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == ""
    assert result["finish_reason"] == "stop"
    assert [t["text"] for t in result["tokens"]] == ["<issue_start>", "<|endoftext|>"]


def test_stats_go_to_standard_error(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder, "-p", PROMPT, "--stats", "--temp", "1", "--seed", "5")) == 0
    out, err = capsys.readouterr()
    assert out == expected_text(loaded, temperature=1.0, seed=5)
    for part in (r"prompt: .* tokens, .* tok/s", r"generation: .* tok/s", "first token", "memory"):
        assert re.search(part, err)
    assert re.search(r"seed: +5\b", err)


def test_no_rate_is_told_for_what_did_not_run(folder: Path, capsys: Capture) -> None:
    assert main(options(folder, "-p", PROMPT, "--stats", count=0)) == 0
    rates = re.findall(r"([\d.]+) tok/s", capsys.readouterr().err)
    assert [float(rate) for rate in rates] == [0, 0]


def test_logprobs_go_to_standard_error(folder: Path, loaded: LoadedModel, capsys: Capture) -> None:
    assert main(options(folder, "-p", "d", "--logprobs", "2", count=3)) == 0
    out, err = capsys.readouterr()
    assert out == expected_text(loaded, "d", 3)
    assert len(err.splitlines()) == 3
    assert all(len(re.findall(r"-\d+\.\d{3}\b", line)) == 3 for line in err.splitlines())


def test_colours_by_probability_reach_a_pipe(
    folder: Path, loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(options(folder, "-p", PROMPT, "--colorize")) == 0
    out, err = capsys.readouterr()
    assert ANSI.sub("", out) == expected_text(loaded) + "\n"
    assert len(set(ANSI.findall(out))) > 2
    assert err == ""


# --- on a terminal ---


def on_terminal(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code of `main` with a pseudo-terminal as standard output, and what it received."""
    controller, terminal = pty.openpty()
    tty.setraw(terminal)
    received: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(controller, 4096):
                received.append(data)
        except OSError:  # how Linux says that the other side was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patched, open(terminal, "w", encoding="utf-8") as stream:  # noqa: PTH123
        patched.setattr(sys, "stdout", stream)
        code = main(arguments)
    reader.join()
    os.close(controller)
    return code, b"".join(received).decode()


PYTHON = (
    '(x): # note\n    """text\n\n    more"""\n    return [f"{x!r}", 1.5] + None\n\n\nclass A: ...\n'
)
TEXTS = {
    "code": PYTHON,
    "white space": "  \n   \n\n  x  ",
    "a tab": "(x):\n\tif x:\n\t\treturn\t1\n",
    "markup": "[red]x[/red] :smile: [/] \\[b]",
    "wide": "é日本語😀" * 30,
    "unclosed string": '"""a\nb',
    "a long line": "x + " * 60,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("language", ["python", "html", "make"])
def test_highlighting_changes_nothing_but_colours(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, language: str
) -> None:
    use(monkeypatch, writing(loaded, TEXTS[name].encode()))
    arguments = ["generate", "-p", "f", "-n", "2000", "--language", language]
    code, received = on_terminal(monkeypatch, arguments)
    assert code == 0
    assert ANSI.sub("", received) == TEXTS[name] + "\n"


def test_a_terminal_gets_highlighted_code(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, writing(loaded, PYTHON.encode()))
    _, received = on_terminal(monkeypatch, ["generate", "-p", "f"])
    assert len(set(ANSI.findall(received))) > 3
    code, plain = on_terminal(monkeypatch, ["generate", "-p", "f", "--no-highlight"])
    assert (code, plain) == (0, PYTHON + "\n")


HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x08\x7f\x9bc\0d"


@pytest.mark.parametrize("more", [[], ["--no-highlight"], ["--colorize"]])
def test_control_characters_never_reach_a_terminal(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    use(monkeypatch, writing(loaded, HOSTILE.encode()))
    code, received = on_terminal(monkeypatch, ["generate", "-p", "x", *more])
    shown = ANSI.sub("", received)
    assert code == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert [c for c in shown if c.isascii() and c.isalnum()] == list("a0title2Jbcd")


@pytest.mark.parametrize("more", [[], ["--no-highlight"], ["--colorize"]])
def test_a_carriage_return_cannot_hide_text_on_a_terminal(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    use(monkeypatch, writing(loaded, b"rm -rf /\rls\r\nx"))
    _, received = on_terminal(monkeypatch, ["generate", "-p", "x", *more])
    assert "\r" not in received.replace("\r\n", "\n")


# --- standard output that takes nothing ---


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert main(options(folder, "-p", "x", *more)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "No space left" in err
    assert err.count("\n") == 1


def test_a_closed_standard_output(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`>&-`: Python has no standard output then. A mistake or nothing, but no fault of ours."""
    monkeypatch.setattr(sys, "stdout", None)
    code = main(options(folder, "-p", "x"))
    assert code in (0, 2)
    assert "fault" not in capsys.readouterr().err


def test_a_closed_standard_error_does_not_spoil_the_output(
    folder: Path, loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(options(folder, "-p", PROMPT, "--stats")) == 0
    assert capsys.readouterr().out == expected_text(loaded)


# --- interrupted ---


class Interrupting(tiny.ScriptedModel):
    """A script in whose middle the user presses Ctrl-C."""

    def hidden(self, batch: StepBatch) -> Tensor:
        if int(batch.positions[0, -1]) >= self.prompt + 2:
            raise KeyboardInterrupt
        return super().hidden(batch)


def interrupted(loaded: LoadedModel, text: str) -> LoadedModel:
    tokens = loaded.require_tokenizer().encode(text)
    return replace(loaded, model=Interrupting(tokens, loaded.config.vocab_size, 1))


def test_ctrl_c_keeps_what_was_written(
    loaded: LoadedModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, interrupted(loaded, "abcdef"))
    assert main(["generate", "-p", "x"]) == 130
    assert capsys.readouterr() == ("abc", "")
    # Text that waits for a stop string to be completed is not lost either.
    assert main(["generate", "-p", "x", "--stop", "bcd!"]) == 130
    assert capsys.readouterr().out == "abc"
    assert main(["generate", "-p", "x", "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"]) == ("abc", "cancelled")
    code, received = on_terminal(monkeypatch, ["generate", "-p", "x"])
    assert (code, ANSI.sub("", received)) == (130, "abc\n")


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_ctrl_c_while_loading(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starquill.cli.run.load", raising(KeyboardInterrupt()))
    assert main(["generate", "-p", "x"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def process(arguments: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "starquill", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        # A shell's background job ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_sigint_ends_a_process_cleanly(folder: Path, loaded: LoadedModel) -> None:
    running = process(options(folder, "-p", PROMPT, count=150_000))
    assert running.stdout is not None
    first = running.stdout.read(20)
    running.send_signal(signal.SIGINT)
    rest, err = running.communicate()
    assert running.returncode == 130
    assert err == b""
    written = first + rest
    expected = expected_text(loaded, count=300).encode()
    assert written[: len(expected)] == expected[: len(written)]


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    """As in `starquill generate ... | head -c 1`."""
    with process(options(folder, "-p", PROMPT, count=150_000)) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert len(running.stdout.read(1)) == 1
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0


def test_utf8_in_and_out_whatever_the_locale(folder: Path, loaded: LoadedModel) -> None:
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    running = process(options(folder, "-p", "-"), **settings)
    out, err = running.communicate("é\n".encode())
    assert (running.returncode, err) == (0, b"")
    expected = expected_text(loaded, "é\n")
    assert out.decode() == expected
    assert not expected.isascii()


@pytest.mark.parametrize("mistake", [["--temp", "-1"], ["--language", "klingon"], ["-n", "-1"]])
def test_mistakes_in_options_are_told_before_the_model_is_loaded(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, mistake: list[str]
) -> None:
    """Loading a large model takes minutes."""
    monkeypatch.setattr("starquill.cli.run.load", raising(AssertionError("loaded first")))
    for verb in (["generate", "-p", "x"], ["fill", "--prompt", "a<fill>b"]):
        assert main([*verb, *mistake]) == 2
        assert capsys.readouterr().err.count("\n") == 1
