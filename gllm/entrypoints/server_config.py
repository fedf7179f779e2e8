"""What the HTTP server needs beside the engine's configuration; its flags are made from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gllm.config import EngineConfig, flag, option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Raises ValueError in one line that says what to change."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every interface")
    port: int = option(8000, "port to listen on; 0: any free one, printed when ready")
    served_model_name: tuple[str, ...] = option((), "names that requests may use (default: --model-path as given)")
    api_key: str | None = option(None, "what clients of /v1 have to send as Authorization: Bearer KEY", metavar="KEY")
    generation_config: str = option(
        "auto",
        "what requests get that name no temperature, top_p, ...: the checkpoint's generation_config.json (auto), or "
        "OpenAI's defaults (none)",
        choices=("auto", "none"),
    )
    max_request_bytes: int = option(256 << 20, "largest request body, in bytes; larger ones get 413")
    body_timeout: float = option(30.0, "seconds without a byte after which the upload of a request body is given up")
    keep_alive_timeout: int = option(30, "seconds that an idle connection stays open")
    shutdown_timeout: float = option(3.0, "seconds that running requests get to finish after SIGTERM or SIGINT")
    log_level: str = option("info", "least severe messages on stderr", choices=LOG_LEVELS)
    access_log: bool = option(False, "log a line for every HTTP request")

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ValueError(text)

        need(bool(self.host), "--host must not be empty")
        need(0 <= self.port <= 65535, f"--port must be between 0 and 65535, got {self.port}")
        need(all(self.served_model_name), "--served-model-name must not be empty")
        need(self.api_key is None or bool(self.api_key), "--api-key must not be empty")
        need(self.max_request_bytes >= 1, f"--max-request-bytes must be at least 1, got {self.max_request_bytes}")
        need(self.body_timeout > 0, "--body-timeout must be above 0 seconds")
        need(self.keep_alive_timeout >= 1, "--keep-alive-timeout must be at least 1 second")
        need(self.shutdown_timeout >= 0, "--shutdown-timeout must be 0 seconds or more")
        for f in dataclasses.fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            need(not choices or value in choices, f"--{flag(f.name)} must be one of {', '.join(choices)}")

    def model_names(self, engine: EngineConfig) -> tuple[str, ...]:
        """The names of the served model, the one that responses carry first."""
        return self.served_model_name or (engine.model_path or "demo",)
