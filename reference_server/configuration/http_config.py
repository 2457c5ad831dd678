"""Settings of the HTTP server: its routes and keys, its tokenizer and its clients."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reference_server.configuration.common_config import CommonConfig
from reference_server.configuration.config_fields import FieldSource, NonNegative, Port, Secret, Strings, Words


class HttpConfig(CommonConfig):
    """HTTP, tokenizer and clients"""

    hostname: str = Field(
        "0.0.0.0", description="Address or host name to listen on. The machine's own host name means every interface."
    )
    port: Annotated[Port, FieldSource(short="p")] = Field(3000, description="Port of the HTTP server.")
    prometheus_port: Port | None = Field(
        None, description="Second port, which serves /metrics only. Unset: /metrics on --port only."
    )
    api_key: Annotated[Secret | None, FieldSource()] = Field(
        None,
        description="Key that clients have to send as a bearer token. Unset, also without --api-key-file: no key is "
        "required.",
    )
    api_key_file: Path | None = Field(
        None, description="File with one bearer key on each line. Clients may use any of them, or --api-key."
    )
    adapter_fallback: bool = Field(
        False,
        description="Serve requests that name an unknown adapter with the base model, as TGI does. Default: the router "
        "refuses them if any adapter is loaded; without adapters, every name selects the base model.",
    )
    auth_all_routes: bool = Field(
        False,
        description="Require the key on all routes except /health, /ping and /ready. Default: only on routes that "
        "generate, tokenize or load adapters.",
    )
    cors_allow_origin: Annotated[Strings, FieldSource(repeated=True)] = Field(
        (),
        description="Origin that browsers may send requests from (CORS); repeat the flag for several. Unset: any "
        "origin.",
    )
    shutdown_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM during which /ready answers 503 and requests are still accepted, so that a "
        "load balancer can remove the server first.",
    )
    payload_limit: NonNegative = Field(2_000_000, description="Largest body of a request, in bytes.")
    tokenizer_name: str | None = Field(
        None,
        min_length=1,
        description="Tokenizer that counts and splits prompts: hub repository, local directory or `preset:NAME`. "
        "Unset: the model's.",
    )
    tokenizer_config_path: Path | None = Field(
        None, description="Path of a tokenizer_config.json, for the chat template, to use instead of the model's."
    )
    validation_workers: int = Field(
        2, description="Threads that tokenize prompts in the router. Raise it if requests wait for tokenization."
    )
    disable_grammar_support: bool = Field(False, description="Refuse requests with a grammar or a JSON schema.")
    allow_image_fetch: bool = Field(
        False,
        description="Fetch images that requests name by URL, from public addresses on ports 80 and 443. Default: only "
        "images inside the request are accepted.",
    )
    max_image_fetch_size: NonNegative = Field(33_554_432, description="Largest image that is fetched, in bytes.")
    image_fetch_hosts: Words = Field(
        (), description="Hosts from which images may be fetched. Unset: every host with a public address."
    )
    plain_text_decode_errors: bool = Field(
        False, description="Report a request body that cannot be decoded in plain text, as TGI does, instead of JSON."
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        "on",
        description="Accepted for compatibility with TGI, without effect: the server never sends usage statistics.",
    )
    vertex: bool = Field(False, description="Serve the routes that Vertex AI sets in the AIP_* variables.")
    aip_http_port: Annotated[Port | None, FieldSource(flag=False)] = Field(
        None, description="With --vertex: port of the HTTP server, instead of --port."
    )
    aip_predict_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: path of the route for predictions, instead of /vertex."
    )
    aip_health_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: path of the health check, instead of /health."
    )
    kserve: bool = Field(False, description="Serve the routes of the KServe v2 protocol too.")
    ngrok: bool = Field(False, description="Open an ngrok tunnel to the server.")
    ngrok_authtoken: Secret | None = Field(None, description="Authentication token for --ngrok.")
    ngrok_edge: str | None = Field(None, description="Edge for --ngrok.")
    compute_type: Annotated[str | None, FieldSource(flag=False)] = Field(
        None,
        description="Value of the x-compute-type header of responses. Unset: number of shards and name of the GPU.",
    )
    docker_label: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Label of the container image; part of /info and of system_fingerprint."
    )
    tuned_by: str | None = Field(
        None,
        description="Study and trial that chose these settings, as STUDY/TRIAL or STUDY/TRIAL/confirmed; part of "
        "/info. `tgi-tune export` writes it.",
    )
    launch_settings: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Set by the launcher: JSON with value, source and reason of each setting, for /config."
    )

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        if self.validation_workers <= 0:
            raise ValueError("`validation_workers` must be > 0")
        if self.ngrok and (self.ngrok_authtoken is None or self.ngrok_edge is None):
            raise ValueError("`ngrok` needs `ngrok_authtoken` and `ngrok_edge`")
        return self
