"""Reading a checkpoint's small files, and writing files so that none is ever half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from starquill.errors import BadRequestError, CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    text = read_checkpoint_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise CheckpointError(f"{path} is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be a real file") from None
    except ValueError as error:  # a number of thousands of digits
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} (expected an object)")
    return value


def read_checkpoint_text(path: Path) -> str:
    """A text file of a checkpoint."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 (byte {error.start})") from None


def exists(path: Path) -> bool:
    """Whether there is such a file; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, and an empty object where there is no such file."""
    return read_json(path) if path.exists() else {}


def read_text(path: Path) -> str:
    """A user's text file, exactly: UTF-8, line endings untouched."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            "convert it to UTF-8 first"
        ) from None
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror}") from None


def read_texts(data: Path, suffix: str, option: str = "--suffix") -> list[str]:
    """The file, or every file with `suffix` below the folder, in order. `option` names `suffix`."""
    if not data.is_dir():
        return [read_text(data)]
    files = sorted(path for path in data.rglob(f"*{suffix}") if path.is_file())
    if not files:
        raise BadRequestError(f"{data} has no {suffix} files; name others with {option}")
    return [read_text(path) for path in files]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` (following a symbolic link, keeping its mode) in one step, or not at all."""
    target = path.resolve()
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
