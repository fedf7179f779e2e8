"""Flags come from the configs' fields: all of them, under all their names, with one-line errors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from gllm.config import EngineConfig, flag
from gllm.entrypoints.cli import parse_server_args
from gllm.entrypoints.server_config import ServerConfig


def engine(*argv: str) -> EngineConfig:
    return parse_server_args(argv)[0]


def server(*argv: str) -> ServerConfig:
    return parse_server_args(argv)[1]


def test_no_flags_are_the_defaults() -> None:
    assert parse_server_args([]) == (EngineConfig(), ServerConfig())


def test_kinds_of_values() -> None:
    config = engine(
        "--rserve", "--no-intra-request-overlap", "--encoders", "2", "--media-timeout", "1.5", "--model-path", "/m",
        "--limit-mm-per-prompt", '{"image": 3}', "--allowed-media-domains", "a.org,b.org", "c.org",
        "--allowed-media-domains", "d.org",
    )  # fmt: skip
    assert config == EngineConfig(
        rserve=True, intra_request_overlap=False, encoders=2, media_timeout=1.5, model_path="/m",
        limit_mm_per_prompt={"image": 3}, allowed_media_domains=("a.org", "b.org", "c.org", "d.org"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["maxp", "token-budget", "max-num-batched-tokens", "max_num_batched_tokens"])
def test_all_names_of_a_field_set_it(name: str) -> None:
    assert engine(f"--{name}", "77").max_num_batched_tokens == 77
    assert engine(f"--{name}=77").max_num_batched_tokens == 77


def test_server_flags() -> None:
    config = server("--port", "0", "--host", "::1", "--served-model-name", "a", "b", "--access-log")
    assert (config.port, config.host, config.access_log) == (0, "::1", True)
    assert config.model_names(EngineConfig()) == ("a", "b")
    assert server().model_names(EngineConfig(model_path="/m")) == ("/m",)
    assert server().model_names(EngineConfig()) == ("demo",)


def test_help_shows_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)):
        for name in (field.name, *field.metadata["names"]):
            assert f"--{'no-' if field.default is True else ''}{flag(name)}" in text
    assert "(default: 2048)" in text
    assert "(default: 127.0.0.1)" in text


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--page-size", "0"], "--page-size must be at least 1"),
        (["--page-size", "x"], "invalid whole number value: 'x'"),
        (["--page-size", "1.0"], "invalid whole number value"),
        (["--media-timeout", "nan"], "invalid number value"),
        (["--media-timeout", "-1"], "--media-timeout"),
        (["--dtype", "int8"], "invalid choice"),
        (["--limit-mm-per-prompt", "{"], "not JSON"),
        (["--limit-mm-per-prompt", "[1]"], "not a JSON object"),
        (["--limit-mm-per-prompt", '{"image": "x"}'], "every value must be of type int"),
        (["--limit-mm-per-prompt", '{"image": true}'], "every value must be of type int"),
        (["--no-intra-request-overlap"], "add --rserve"),
        (["--rserve", "--encoders", "0"], "--encoders 1 or more"),
        (["--rserv"], "unrecognized arguments: --rserv"),
        (["--intra-request-overlap"], "unrecognized arguments"),
        (["stray"], "unrecognized arguments: stray"),
        (["--port", "65536"], "--port must be between 0 and 65535"),
        (["--host", ""], "--host must not be empty"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", "a,,b"], "--served-model-name must not be empty"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("api_server: error: ")
    assert error.count("\n") == 1


def test_importing_the_server_loads_no_torch() -> None:
    code = "import sys, gllm.entrypoints.api_server; assert not {'torch', 'transformers', 'openai'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_wrong_flag_ends_the_process_without_a_traceback() -> None:
    command = [sys.executable, "-m", "gllm.entrypoints.api_server", "--page-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "api_server: error: --page-size must be at least 1, got 0\n"
