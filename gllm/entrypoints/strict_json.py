"""Request bodies: bytes to Python values, refusing what JSON libraries let through (NaN, duplicate keys, lone
surrogates, bottomless nesting) before it can reach a tokenizer or a socket."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from gllm.errors import BadRequest

MAX_DEPTH = 64


def parse(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises BadRequest."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise _invalid(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # the interpreter refuses to convert more than some thousands of digits
        raise _invalid("a number has too many digits") from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Bound the depth and make sure that every string can be encoded. A loop, since recursion would hit its limit."""
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, str):
            _check_string(value)
            continue
        if depth == MAX_DEPTH:
            raise _invalid(f"nested more than {MAX_DEPTH} levels deep")
        children = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ()
        todo.extend((child, depth + 1) for child in children if isinstance(child, (str, list, dict)))


def _check_string(text: str) -> None:
    if text.isascii():  # known without looking at the characters: this keeps megabytes of base64 free
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid("a string has half of a surrogate pair, which is no character") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        times = Counter(key for key, _ in pairs)
        double = next(key for key in times if times[key] > 1)
        raise _invalid(f"the key {double[:100]!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise _invalid(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is too large")
    return value


def _invalid(reason: str) -> BadRequest:
    return BadRequest(f"The request body is not valid JSON: {reason}.", code="invalid_json")
