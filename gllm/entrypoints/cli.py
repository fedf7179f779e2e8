"""The command line, made from the fields of config dataclasses: a new field is a new flag, and nothing else is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gllm.config import EngineConfig, flag, json_option
from gllm.entrypoints.server_config import ServerConfig


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}\n")


def parse_server_args(argv: Sequence[str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    """The API server's configuration. Exits with code 2 and one line on stderr when a flag is wrong."""
    parser = OneLineParser(
        prog="api_server", description="OpenAI-compatible server for multimodal models", allow_abbrev=False
    )
    engine, server = parse_configs(parser, argv, EngineConfig, ServerConfig)
    return engine, server


def parse_configs(parser: argparse.ArgumentParser, argv: Sequence[str] | None, *configs: type) -> list[Any]:
    """One instance of each config dataclass, from the flags in `argv` (default: the process's own). Flags that the
    caller has added to `parser` beforehand are allowed, and their values dropped. A wrong one calls `parser.error`."""
    for config in configs:
        add_flags(parser, config)
    args = vars(parser.parse_args([_dashed(arg) for arg in (sys.argv[1:] if argv is None else argv)]))
    try:
        return [config(**{k: args[k] for k in _field_names(config) if k in args}) for config in configs]
    except ValueError as error:
        parser.error(str(error))


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for every field of a config dataclass; a flag that is not given leaves the field out of the result."""
    group = parser.add_argument_group(config.__name__)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        default = _default(field)
        no = "no-" if default is True else ""
        names = [f"--{no}{flag(name)}" for name in (field.name, *field.metadata["names"])]
        kind = _plain_type(hints[field.name])
        group.add_argument(
            *names,
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field, default),
            **_reading(kind, field.metadata, default),
        )


def _reading(kind: Any, metadata: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if kind is bool:
        return {"action": "store_false" if default else "store_true"}
    origin = typing.get_origin(kind) or kind
    choices = metadata["choices"] or None
    how = {"metavar": metadata["metavar"] or (None if choices else _METAVARS[origin]), "choices": choices}
    if origin is tuple:
        return {**how, "type": _comma_separated, "nargs": "+", "action": _Extend}
    if origin is dict:
        return {**how, "type": _json_object(typing.get_args(kind)[1])}
    return {**how, "type": kind if kind is str else _number(kind)}


_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT", dict: "JSON"}


class _Extend(argparse.Action):
    """Collects `--x a,b c` and repeated `--x` into one tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, given + tuple(part for parts in values for part in parts))


def _comma_separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]  # argparse says "invalid <name> value: ..."
    return parse


def _json_object(value_type: Any) -> Any:
    """A parser of JSON objects whose values are all of `value_type`."""

    def parse(text: str) -> dict[str, Any]:
        try:
            value = json_option(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
        if value_type is not Any and not all(type(v) is value_type for v in value.values()):
            raise argparse.ArgumentTypeError(f"every value must be of type {value_type.__name__}: {text!r}")
        return value

    return parse


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`; other types as they are."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _help(field: dataclasses.Field[Any], default: Any) -> str:
    text: str = field.metadata["help"]
    if isinstance(default, bool):
        text = f"do not: {text}" if default else text
    elif default not in (None, (), {}):
        text = f"{text} (default: {json.dumps(default) if isinstance(default, dict) else default})"
    return text.replace("%", "%%")


def _field_names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _dashed(arg: str) -> str:
    """`--max_model_len=8` as `--max-model-len=8`: both spellings are in use among engines."""
    name, equals, value = arg.partition("=")
    return flag(name) + equals + value if name.startswith("--") else arg
