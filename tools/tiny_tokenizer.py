"""Tokenizer and token rows for the bundled tiny StarCoder2 model.

``train_tokenizer`` learns a byte-level BPE with StarCoder2's special tokens and pre-tokenizer but
a small vocabulary.  ``build_rows`` turns the corpus of ``tools/tiny_corpus.py`` into shuffled rows
of token ids: half plain source (some of it in repository form), half fill-in-the-middle samples in
both of StarCoder's orders.  Each pass over the corpus swaps which files are plain and which are
cut up, so that a second pass shows every file in its other form.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tiny_corpus import Document, read_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<fim_pad>",
    "<repo_name>",
    "<file_sep>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<jupyter_script>",
    "<empty_output>",
    "<code_to_intermediate>",
    "<intermediate_to_code>",
    "<pr>",
    "<pr_status>",
    "<pr_is_merged>",
    "<pr_base>",
    "<pr_file>",
    "<pr_base_code>",
    "<pr_diff>",
    "<pr_diff_hunk>",
    "<pr_comment>",
    "<pr_event_id>",
    "<pr_review>",
    "<pr_review_state>",
    "<pr_review_comment>",
    "<pr_in_reply_to_review_id>",
    "<pr_in_reply_to_comment_id>",
    "<pr_diff_hunk_comment_line>",
    "<NAME>",
    "<EMAIL>",
    "<KEY>",
    "<PASSWORD>",
]
END, PREFIX, MIDDLE, SUFFIX = 0, 1, 2, 3
REPO, FILE = 5, 6
VOCAB_SIZE = 5120
MODEL_MAX_LENGTH = 4096

Ids = list[int]
Spans = tuple[int, int]


@dataclass(frozen=True)
class SampleSettings:
    """How documents become samples, and samples become rows."""

    seed: int = 21
    context: int = 1024
    passes: int = 2
    repo_share: float = 0.15
    repo_files: int = 3
    fim_min: int = 100
    fim_max: int = 950
    fim_with_file: float = 0.20
    file_max: int = 300
    span_holes: float = 0.4
    line_holes: float = 0.3
    block_lines: int = 8

    @property
    def row(self) -> int:
        """Tokens in a row: the context and one more, so that every position has a target."""
        return self.context + 1


def train_tokenizer(documents: list[Document], folder: Path, every: int = 3) -> None:
    """Learn the BPE on every n-th document; write tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents[::every]), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = SPECIAL_TOKENS[END]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class Encoder:
    """Encodes pieces of text; special tokens spelled out in source code stay ordinary text."""

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json."""
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True

    def __call__(self, texts: list[str]) -> list[Ids]:
        """The token ids of each text."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def plain_samples(
    documents: list[Document], encode: Encoder, settings: SampleSettings
) -> list[Ids]:
    """Whole files, some of them joined in repository form."""
    rng = random.Random(f"{settings.seed}/plain/{documents[0].package}") if documents else None
    codes = encode([document.text for document in documents])
    names = encode([document.package for document in documents])
    paths = encode([document.path + "\n" for document in documents])
    share, group = settings.repo_share, settings.repo_files
    chance = share / (group - share * (group - 1))
    samples, at = [], 0
    while at < len(documents):
        if rng is not None and rng.random() < chance:
            sample = [REPO, *names[at]]
            for path, code in zip(paths[at : at + group], codes[at : at + group], strict=True):
                sample += [FILE, *path, *code]
            at += group
        else:
            sample = codes[at]
            at += 1
        samples.append([*sample, END])
    return samples


def choose_hole(text: str, rng: random.Random, settings: SampleSettings) -> Spans:
    """Pick the characters that a fill-in-the-middle sample leaves out."""
    kind = rng.random()
    if kind < settings.span_holes:
        first, last = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        return first, last
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    index = rng.choice([i for i, line in enumerate(lines) if line.strip()] or [0])
    line = lines[index]
    if kind < settings.span_holes + settings.line_holes:
        bare = line.rstrip("\r\n")
        indent = len(bare) - len(bare.lstrip())
        column = rng.choice((0, indent, *[rng.randint(indent, len(bare)) for _ in range(2)]))
        return starts[index] + column, starts[index] + len(bare)
    count = rng.randint(1, settings.block_lines)
    return starts[index], starts[min(index + count, len(lines))]


def cut_segment(text: str, start: int, size: int) -> int:
    """Where a segment of about ``size`` characters from ``start`` ends, at a line border."""
    if start + size >= len(text):
        return len(text)
    end = text.rfind("\n", start + 1, start + size)
    if end < 0:
        end = text.find("\n", start + size)
    return len(text) if end < 0 else end + 1


@dataclass(frozen=True)
class FimPiece:
    """The texts of one fill-in-the-middle sample."""

    prefix: str
    middle: str
    suffix: str
    before: tuple[str, str] | None
    suffix_first: bool


def fim_pieces(
    documents: list[Document], ratios: list[float], settings: SampleSettings, rng: random.Random
) -> Iterator[FimPiece]:
    """Cut documents into segments with a hole; ratios are their characters per token."""
    low, high = math.log(settings.fim_min), math.log(settings.fim_max)
    for document, ratio in zip(documents, ratios, strict=True):
        text, start = document.text, 0
        while start < len(text):
            tokens = math.exp(rng.uniform(low, high))
            before, header = None, ""
            if rng.random() < settings.fim_with_file:
                other = rng.randrange(len(documents))
                before = _other_file(documents[other], ratios[other], settings, rng)
                header = document.path + "\n"
                tokens = min(tokens, settings.context - settings.file_max - 80)
            end = cut_segment(text, start, int(tokens * ratio))
            segment = text[start:end]
            start = end
            if len(segment) < settings.fim_min:
                continue
            first, last = choose_hole(segment, rng, settings)
            yield FimPiece(
                header + segment[:first],
                segment[first:last],
                segment[last:],
                before,
                rng.random() < 0.5,
            )


def _other_file(
    document: Document, ratio: float, settings: SampleSettings, rng: random.Random
) -> tuple[str, str]:
    size = int(rng.uniform(0.2, 0.95) * settings.file_max * ratio)
    begin = rng.choice((0, document.text.rfind("\n", 0, rng.randint(0, len(document.text))) + 1))
    end = cut_segment(document.text, begin, size)
    repo, path = document.package, document.path
    return repo, f"{path}\n{document.text[begin:end]}"


def fim_samples(documents: list[Document], encode: Encoder, settings: SampleSettings) -> list[Ids]:
    """Fill-in-the-middle samples of some documents of one package, none over the context."""
    if not documents:
        return []
    rng = random.Random(f"{settings.seed}/fim/{documents[0].package}")
    codes = encode([document.text for document in documents])
    ratios = [len(d.text) / max(len(c), 1) for d, c in zip(documents, codes, strict=True)]
    pieces = list(fim_pieces(documents, ratios, settings, rng))
    prefixes = encode([piece.prefix for piece in pieces])
    middles = encode([piece.middle for piece in pieces])
    suffixes = encode([piece.suffix for piece in pieces])
    repos = encode([piece.before[0] if piece.before else "" for piece in pieces])
    others = encode([piece.before[1] if piece.before else "" for piece in pieces])
    samples = []
    for i, piece in enumerate(pieces):
        sample = [REPO, *repos[i], FILE, *others[i], FILE] if piece.before else []
        if piece.suffix_first:
            sample += [PREFIX, SUFFIX, *suffixes[i], MIDDLE, *prefixes[i], *middles[i], END]
        else:
            sample += [PREFIX, *prefixes[i], SUFFIX, *suffixes[i], MIDDLE, *middles[i], END]
        if len(sample) <= settings.context:
            samples.append(sample)
    return samples


def package_samples(
    documents: list[Document], number: int, tokenizer: Path, settings: SampleSettings
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Plain and fill-in-the-middle samples of one package in pass ``number``."""
    encode = Encoder(tokenizer)
    order = list(documents)
    random.Random(f"{settings.seed}/{documents[0].package}").shuffle(order)
    plain = plain_samples(order[number % 2 :: 2], encode, settings)
    fim = fim_samples(order[(number + 1) % 2 :: 2], encode, settings)
    return [np.array(s, np.uint16) for s in plain], [np.array(s, np.uint16) for s in fim]


def pack_rows(
    plain: list[np.ndarray], fim: list[np.ndarray], row: int, rng: random.Random
) -> np.ndarray:
    """Pack samples into shuffled rows.

    Long files are cut so that a row begins where the file does; fill-in-the-middle samples are
    never cut, and what they leave of a row is filled from the ends of the plain files.
    """
    rng.shuffle(plain)
    rng.shuffle(fim)
    full, tails = [], []
    for sample in plain:
        whole = len(sample) // row * row
        full += np.split(sample[:whole], whole // row) if whole else []
        tails.append(sample[whole:])
    rng.shuffle(full)
    filler, rows, at = np.concatenate(tails), [], 0
    while at < len(fim):
        chosen, room = [], row
        while at < len(fim) and len(fim[at]) <= room:
            room -= len(fim[at])
            chosen.append(fim[at])
            at += 1
        while len(filler) < room:
            filler = np.concatenate([filler, full.pop()])
        # Either kind may begin a row, as either may begin a prompt.
        chosen.insert(rng.choice((0, len(chosen))), filler[:room])
        filler = filler[room:]
        rows.append(np.concatenate(chosen))
    rows += full + np.split(filler[: len(filler) // row * row], max(len(filler) // row, 1))
    rows = [r for r in rows if len(r) == row]
    rng.shuffle(rows)
    return np.stack(rows)


def build_rows(source: Path, tokenizer: Path, target: Path, settings: SampleSettings) -> None:
    """Write the token rows of a JSON-lines file of documents as a uint16 .npy array."""
    packages: dict[str, list[Document]] = defaultdict(list)
    for document in read_documents(source):
        packages[document.package].append(document)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts = []
    with ProcessPoolExecutor() as pool:
        for number in range(settings.passes):
            work = partial(package_samples, number=number, tokenizer=tokenizer, settings=settings)
            results = list(pool.map(work, packages.values()))
            plain = [sample for result in results for sample in result[0]]
            fim = [sample for result in results for sample in result[1]]
            rng = random.Random(f"{settings.seed}/rows/{number}")
            parts.append(pack_rows(plain, fim, settings.row, rng))
            sizes = [sum(map(len, samples)) / 1e6 for samples in (plain, fim)]
            print(
                f"{source.stem} pass {number}: {len(parts[-1])} rows; plain {len(plain)} samples, "
                f"{sizes[0]:.1f} M tokens; fim {len(fim)} samples, {sizes[1]:.1f} M tokens",
                flush=True,
            )
    np.save(target, np.concatenate(parts))
