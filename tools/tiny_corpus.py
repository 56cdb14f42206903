"""Collect the Python source code that the bundled tiny StarCoder2 model is trained on.

The corpus is the standard library of the running Python plus the wheels of some eighty pinned
PyPI packages, all under permissive licences (read from each wheel's METADATA; anything copyleft or
unknown is refused).  A few packages are held out whole for evaluation; training files that share
too many lines with them are dropped.

Run it directly to (re)build the corpus, or through ``tools/train_tiny.py``::

    python tools/tiny_corpus.py --work build/tiny

It writes ``train.jsonl`` and ``heldout.jsonl`` (one ``{"package", "path", "text"}`` a line) and
``sources.json`` (what each package contributed, with its licence).  The result is a function of
the pins, the seed and the running Python only (3.11 is what the pins resolve for).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

TRAIN_PINS = [
    "accelerate==1.15.0",
    "aiohttp==3.14.5",
    "altair==6.3.0",
    "anyio==4.16.0",
    "astropy==8.0.2",
    "babel==2.19.0",
    "black==26.10.1",
    "bokeh==3.9.2",
    "boto3==1.44.8",
    "celery==5.7.0",
    "click==8.5.1",
    "dask==2026.8.0",
    "datasets==5.2.0",
    "distributed==2026.8.0",
    "django==5.2.19",
    "djangorestframework==3.18.3",
    "fastapi==0.165.0",
    "flask==3.1.3",
    "fsspec==2026.9.0",
    "ipython==9.18.1",
    "jinja2==3.1.6",
    "joblib==1.6.0",
    "jsonschema==4.26.0",
    "jupyter_server==2.21.1",
    "kombu==5.7.0",
    "lark==1.3.1",
    "luigi==3.8.1",
    "marshmallow==4.4.0",
    "matplotlib==3.11.2",
    "mkdocs==1.6.1",
    "mypy==2.4.1",
    "nbconvert==7.17.2",
    "networkx==3.6.1",
    "nltk==3.10.4",
    "numpy==2.4.6",
    "openpyxl==3.1.5",
    "optuna==5.0.0",
    "pandas==3.1.1",
    "pip==26.3",
    "prefect==3.9.1",
    "prompt_toolkit==3.0.53",
    "pydantic==2.14.4",
    "pygments==2.21.0",
    "pymongo==4.20.1",
    "pyparsing==3.3.3",
    "pypdf==7.1.1",
    "pytest==9.2.0",
    "redis==8.1.0",
    "requests==2.34.2",
    "rich==15.0.0",
    "scikit_image==0.26.0",
    "scikit_learn==1.9.1",
    "scipy==1.17.1",
    "scrapy==2.19.0",
    "seaborn==0.13.2",
    "sentry_sdk==2.75.0",
    "setuptools==84.2.1",
    "sphinx==9.0.4",
    "sqlalchemy==2.1.9",
    "sqlglot==30.30.0",
    "starlette==1.10.0",
    "statsmodels==0.15.0",
    "streamlit==1.67.0",
    "sympy==1.14.0",
    "textual==8.2.8",
    "tornado==6.6.1",
    "traitlets==5.16.1",
    "transformers==5.24.0",
    "trio==0.35.0",
    "twisted==26.10.0",
    "typer==0.29.2",
    "urllib3==2.8.0",
    "uvicorn==0.54.0",
    "wagtail==8.0.1",
    "werkzeug==3.1.9",
    "xarray==2026.9.0",
    "xlsxwriter==3.3.1",
]

HELD_OUT_PINS = [
    "attrs==26.1.0",
    "httpx==0.28.1",
    "tabulate==0.10.0",
    "cachetools==8.0.2",
    "more_itertools==11.2.1",
    "toolz==1.2.0",
    "humanize==4.17.0",
    "pluggy==1.7.0",
]

PERMISSIVE = re.compile(
    r"\b(mit|bsd|0bsd|apache|psf|python software foundation|isc|zlib|unlicense|cc0|hpnd)\b", re.I
)
COPYLEFT = re.compile(r"\b(a?gpl|lgpl|mpl|epl|cddl|eupl|gnu|mozilla)", re.I)
VENDORED = frozenset(
    ["_vendor", "vendor", "_vendored", "vendored", "extern", "externals", "_extern", "node_modules"]
)
STDLIB_SKIPPED = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "site-packages",
        "lib2to3",
        "pydoc_data",
        "turtledemo",
        "encodings",
        "ensurepip",
    ]
)
GENERATED = re.compile(
    r"auto[- ]?generated|automatically generated|generated (by|from|file)|do not (edit|modify)",
    re.I,
)
COMPARABLE_LINE = 25
STDLIB = "cpython"


@dataclass(frozen=True)
class CorpusSettings:
    """What is kept of each package."""

    seed: int = 20
    max_file_bytes: int = 200_000
    min_file_bytes: int = 200
    max_line: int = 400
    max_package_bytes: int = 3_500_000
    max_stdlib_bytes: int = 12_000_000
    max_test_share: float = 0.10
    max_heldout_lines: float = 0.30
    max_digit_share: float = 0.15
    max_non_ascii_share: float = 0.05


@dataclass(frozen=True)
class Document:
    """One source file of one package."""

    package: str
    path: str
    text: str


@dataclass
class Source:
    """What one package contributed to the corpus."""

    package: str
    licence: str
    files: int = 0
    characters: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def download(pins: list[str], folder: Path) -> list[Path]:
    """Fetch the pinned wheels with pip; return them in the order of the pins."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), *pins]
    subprocess.run(command, check=True)
    wheels = []
    for pin in pins:
        name, version = pin.split("==")
        wheels.append(next(iter(sorted(folder.glob(f"{name}-{version}-*.whl")))))
    return wheels


def wheel_metadata(wheel: zipfile.ZipFile) -> Message:
    """The parsed METADATA of an opened wheel."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode("utf-8", "replace"))


def licence_of(metadata: Message) -> str:
    """Describe a distribution's licence; raise ValueError unless it is permissive.

    Only the first line of a ``License`` field is read: some distributions paste the licences of
    the shared libraries inside their wheel after their own.
    """
    stated = [metadata.get("License-Expression") or ""]
    stated += [c.split("::")[-1] for c in metadata.get_all("Classifier", []) if "License ::" in c]
    stated += (metadata.get("License") or "").splitlines()[:1]
    licence = "; ".join(dict.fromkeys(s.strip() for s in stated if s.strip()))
    if COPYLEFT.search(licence) or not PERMISSIVE.search(licence):
        raise ValueError(f"{metadata['Name']}: licence {licence!r} is not a permissive one")
    return licence


def read_wheel(path: Path) -> tuple[str, str, list[tuple[str, bytes]]]:
    """Package name, licence and Python files of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        metadata = wheel_metadata(wheel)
        names = sorted(n for n in wheel.namelist() if n.endswith(".py") and ".data/" not in n)
        files = [(name, wheel.read(name)) for name in names]
    return metadata["Name"].lower(), licence_of(metadata), files


def read_stdlib() -> tuple[str, str, list[tuple[str, bytes]]]:
    """Name, licence and Python files of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not STDLIB_SKIPPED & set(relative.parts):
            files.append((relative.as_posix(), path.read_bytes()))
    return STDLIB, "PSF-2.0", files


def reason_to_drop(path: str, data: bytes, settings: CorpusSettings) -> str | None:
    """Why a file does not belong in the corpus, or None if it does."""
    if VENDORED & set(PurePosixPath(path).parts):
        return "vendored"
    if not settings.min_file_bytes <= len(data) <= settings.max_file_bytes:
        return "size"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "encoding"
    if "\x00" in text or GENERATED.search(text[:1500]):
        return "generated"
    if max(map(len, text.splitlines()), default=0) > settings.max_line:
        return "long lines"
    if sum(map(str.isdigit, text)) > settings.max_digit_share * len(text):
        return "data"
    if len(data) - len(text) > settings.max_non_ascii_share * len(text):
        return "non-ascii"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return "syntax"
    return None


def comparable_lines(text: str) -> Iterator[str]:
    """The stripped lines of a text that are long enough to tell where they come from."""
    return (s for line in text.splitlines() if len(s := line.strip()) >= COMPARABLE_LINE)


def overlap(text: str, known: set[str]) -> float:
    """Share of a text's comparable lines that are among the known ones."""
    lines = list(comparable_lines(text))
    return sum(line in known for line in lines) / len(lines) if lines else 0.0


def is_test(path: str) -> bool:
    """Whether a file is part of a package's own tests."""
    parts = PurePosixPath(path).parts
    return bool({"test", "tests", "testing"} & set(parts)) or parts[-1].startswith("test_")


class Collector:
    """Filters packages one after another, remembering what was already taken."""

    def __init__(self, settings: CorpusSettings, heldout_lines: Iterable[str] = ()) -> None:
        """Start with nothing taken; files like the held-out lines will be refused."""
        self.settings = settings
        self.heldout_lines = set(heldout_lines)
        self.seen: set[bytes] = set()
        self.sources: list[Source] = []

    def add(self, package: str, licence: str, files: list[tuple[str, bytes]]) -> list[Document]:
        """The documents to keep of one package, within its size limits, in order of path."""
        dropped: Counter[str] = Counter()
        kept: list[Document] = []
        stdlib = package == STDLIB
        room = self.settings.max_stdlib_bytes if stdlib else self.settings.max_package_bytes
        room_for_tests = int(room * self.settings.max_test_share)
        files = sorted(files)
        random.Random(f"{self.settings.seed}/{package}").shuffle(files)
        for path, data in files:
            reason = self._refusal(path, data)
            test = is_test(path)
            if reason is None and (len(data) > room or (test and len(data) > room_for_tests)):
                reason = "package limit"
            if reason is not None:
                dropped[reason] += 1
                continue
            room -= len(data)
            room_for_tests -= len(data) if test else 0
            text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            kept.append(Document(package, path, text.lstrip("\ufeff")))
        kept.sort(key=lambda document: document.path)
        size = sum(len(document.text) for document in kept)
        self.sources.append(Source(package, licence, len(kept), size, dict(dropped)))
        return kept

    def _refusal(self, path: str, data: bytes) -> str | None:
        reason = reason_to_drop(path, data, self.settings)
        if reason is not None:
            return reason
        digest = hashlib.sha256(data).digest()
        if digest in self.seen:
            return "duplicate"
        self.seen.add(digest)
        if overlap(data.decode("utf-8"), self.heldout_lines) > self.settings.max_heldout_lines:
            return "like held-out"
        return None


def write_documents(documents: Iterable[Document], path: Path) -> None:
    """Write documents as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def read_documents(path: Path) -> list[Document]:
    """Read what ``write_documents`` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def build_corpus(work: Path, settings: CorpusSettings | None = None) -> None:
    """Download, filter and write the training and held-out documents into a work folder."""
    settings = settings or CorpusSettings()
    wheels = work / "wheels"
    heldout = Collector(settings)
    held_documents = [
        document
        for wheel in download(HELD_OUT_PINS, wheels)
        for document in heldout.add(*read_wheel(wheel))
    ]
    lines = (line for document in held_documents for line in comparable_lines(document.text))
    train = Collector(settings, lines)
    documents = train.add(*read_stdlib())
    for wheel in download(TRAIN_PINS, wheels):
        documents += train.add(*read_wheel(wheel))
    write_documents(held_documents, work / "heldout.jsonl")
    write_documents(documents, work / "train.jsonl")
    sources = {
        "python": sys.version.split()[0],
        "train": [asdict(source) for source in train.sources],
        "heldout": [asdict(source) for source in heldout.sources],
    }
    (work / "sources.json").write_text(json.dumps(sources, indent=1) + "\n", encoding="utf-8")
    for name, collector in (("train", train), ("held-out", heldout)):
        files = sum(source.files for source in collector.sources)
        size = sum(source.characters for source in collector.sources)
        print(f"{name}: {len(collector.sources)} packages, {files} files, {size / 1e6:.1f} MB")


def main() -> None:
    """Build the corpus from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="work folder")
    build_corpus(parser.parse_args().work)


if __name__ == "__main__":
    main()
