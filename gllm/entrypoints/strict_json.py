"""Request bodies: bytes to Python values, refusing what JSON libraries let through (NaN, duplicate keys, lone
surrogates, bottomless nesting) before it can reach a tokenizer or a socket."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from gllm.errors import BadRequest

MAX_DEPTH = 64
MAX_VALUES = 200_000
_STRING_OR_REST = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[^"]++', re.DOTALL)


def parse(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON text in UTF-8, with some limit on the number of values and keys in it. Raises BadRequest."""
    if most_values(body) > max_values and _more_values_than(max_values, body):
        raise BadRequest(f"The request body has more than {max_values:,} JSON values.", code="request_too_large")
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


def most_values(body: bytes) -> int:
    """An upper bound on the values and keys of a JSON text, in microseconds: base64 has none of these characters."""
    return 2 * (body.count(b"{") + body.count(b"[") + body.count(b",")) + 1


def _more_values_than(limit: int, body: bytes) -> bool:
    """Without what stands in strings: prose and tables are full of commas."""
    seen = 0
    for match in _STRING_OR_REST.finditer(body):
        rest = match[0]
        seen += 1 if rest.startswith(b'"') else rest.count(b"{") + rest.count(b"[") + rest.count(b",")
        if seen > limit:
            return True
    return False


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
