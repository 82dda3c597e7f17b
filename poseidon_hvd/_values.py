"""Values from outside: reading them, and showing them in messages.

A bad value is a ValueError that names its source.
"""

import json
import math
import os
import stat
from typing import Any, Callable, Optional

__all__ = ["from_environment", "number", "one_of", "read_json", "shown"]

_MOST_SHOWN = 120  # characters
_MOST_JSON_BYTES = 64 << 20


def shown(value: Any) -> str:
    """The repr of a value, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has none
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def from_environment(variable: str) -> Optional[str]:
    """The text of a variable, or None if it is not set.

    Raises:
        ValueError: it is not UTF-8.
    """
    text = os.environ.get(variable)
    if text is not None:
        _check_unicode(variable, text)
    return text


def number(source: str, value: Any, what: str, most: float) -> float:
    """Checks a number from 0 to ``most``, or text that is one.

    Raises:
        ValueError: it is anything else.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except Exception:  # of a foreign type's own choice
        found = math.nan
    if not 0 <= found <= most:
        raise ValueError(f"{source}: {shown(value)} is not {what} from 0 to {most:g}.")
    return found


def one_of(parse: Callable[[str], Any], source: str, text: Any) -> str:
    """Checks text that the core parses. The core knows the values; the message says where the text came from."""
    if not isinstance(text, str):
        raise ValueError(f"{source}: {shown(text)} is not text.")
    _check_unicode(source, text)
    if len(text) > _MOST_SHOWN or "\0" in text:
        raise ValueError(f"{source}: {shown(text)} is not like any known value.")
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return text


def read_json(path: Any) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: it is not a regular file of at most 64 MiB with JSON in UTF-8. Other files may wait for a writer for
            ever, or never end.
        OSError: it cannot be read.
        RecursionError: it is nested too deep.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > _MOST_JSON_BYTES:
        raise ValueError(f"it has {status.st_size} bytes, more than {_MOST_JSON_BYTES}")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _check_unicode(source: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source}: {shown(text)} is not UTF-8.") from None
