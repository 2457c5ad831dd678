"""The settings of `text-generation-benchmark`: TGI's flags and variables, and the files to write."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from reference_server.configuration.common_config import Command, HubConfig
from reference_server.configuration.config import DEFAULT_SOCKET_PREFIX
from reference_server.configuration.config_fields import FieldSource, NonNegative, Positive

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


def _split_each(value: object) -> object:
    return [part for word in value for part in str(word).split(",")] if isinstance(value, list) else value


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


BatchSizes = Annotated[tuple[Positive, ...], BeforeValidator(_split_each), AfterValidator(_ascending)]


class BenchmarkConfig(HubConfig):
    """Benchmark of steps

    Times prefill and decode of one model server by batch size, without a router and without HTTP. Starts a model server
    (--serve), or uses the one at --master-shard-uds-path, which has to be idle.
    """

    command: ClassVar[Command] = "benchmark"
    examples: ClassVar[tuple[str, ...]] = (
        "text-generation-benchmark --tokenizer-name preset:tiny-llama --serve",
        "text-generation-benchmark -t preset:bloom-560m --serve -b 1 -b 8 -s 128 -d 32 -- --dtype bfloat16",
        "text-generation-benchmark -t ./model -m /run/tgi/shard-0 --html-file page.html --json-file steps.json",
    )

    tokenizer_name: Annotated[str, FieldSource(short="t")] = Field(
        min_length=1, description="Model of the server: hub repository, local directory, or a built-in `preset:NAME`."
    )
    batch_size: Annotated[BatchSizes, FieldSource(short="b", env=(), repeated=True)] = Field(
        DEFAULT_BATCH_SIZES, description="Number of requests in a batch; repeat the flag for several sizes."
    )
    sequence_length: Annotated[Positive, FieldSource(short="s")] = Field(
        10, description="Length of each prompt, in tokens."
    )
    decode_length: Annotated[int, FieldSource(short="d")] = Field(
        8, ge=2, description="Number of tokens that each request generates; the prefill generates the first."
    )
    runs: Annotated[Positive, FieldSource(short="r")] = Field(10, description="Number of timed batches of each size.")
    warmups: Annotated[NonNegative, FieldSource(short="w")] = Field(
        1, description="Number of untimed batches of each size before the timed ones."
    )
    master_shard_uds_path: Annotated[str, FieldSource(short="m")] = Field(
        f"{DEFAULT_SOCKET_PREFIX}-0",
        min_length=1,
        description="Unix socket of the model server with rank 0, which reports the sockets of the others.",
    )
    serve: Annotated[bool, FieldSource(env=())] = Field(
        False,
        description="Start a model server for --tokenizer-name, and stop it after the benchmark. Words after `--` are "
        "flags of `text-generation-server serve`.",
    )
    overwrite_prefix_cache: Annotated[bool, FieldSource(env=())] = Field(
        False,
        description="Use a model server that has a prefix cache. The benchmark overwrites the cached prefixes: restart "
        "the router of this server afterwards.",
    )
    temperature: float | None = Field(None, gt=0, allow_inf_nan=False, description="Sampling temperature. Unset: 1.")
    top_k: Positive | None = Field(None, description="Sample from the k most probable tokens only. Unset: from all.")
    top_p: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Sample from the most probable tokens whose probabilities add up to this value. Unset: from all.",
    )
    typical_p: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Sample from the most typical tokens whose probabilities add up to this value. Unset: from all.",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Factor above 1 that makes repeated tokens less probable. Unset: 1.",
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Value subtracted from a token's logit for each time that it occurred. Unset: 0."
    )
    watermark: bool = Field(False, description="Add TGI's watermark to the output.")
    do_sample: bool = Field(False, description="Sample each token. Default: take the most probable one.")
    top_n_tokens: NonNegative | None = Field(
        None, description="Number of most probable tokens to return with each token. Unset: none."
    )
    json_file: Annotated[Path | None, FieldSource(env=())] = Field(
        None, description="File to write each measured time to, with settings and versions."
    )
    html_file: Annotated[Path | None, FieldSource(env=())] = Field(
        None, description="File to write a page of the results to."
    )
