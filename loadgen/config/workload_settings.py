"""Settings of the workload: its prompts, lengths, prefixes, schemas, adapters and images."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from loadgen.config.parsing import Metavar
from loadgen.config.setting_types import FileText, accepted_by, as_text, as_tuple
from loadgen.workloads.adapter_mix import EXAMPLE as ADAPTER_EXAMPLE
from loadgen.workloads.adapter_mix import parse_names, parse_share
from loadgen.workloads.lengths import EXAMPLES, Lengths
from loadgen.workloads.prompts.images import SHARED_IMAGES
from loadgen.workloads.prompts.installed import WORKLOAD_NAMES
from loadgen.workloads.prompts.synthetic_image import parse_size

WorkloadName = Annotated[str, WORKLOAD_NAMES]

TRACE_WORKLOADS = ("azure_llm", "burstgpt", "mooncake")
FILE_WORKLOADS = ("prompts", "sharegpt")

DEFAULT_IMAGE_SIZE = "336x336"
DEFAULT_INPUT_TOKENS = "128"
DEFAULT_OUTPUT_TOKENS = "64"
DEFAULT_TURNS = "4"
DEFAULT_PREFIX_TOKENS = 256
DEFAULT_PREFIX_GROUPS = 4


def _check_lengths(value: str) -> str:
    return str(Lengths.parse(value))


AdapterText = Annotated[str, accepted_by(parse_share), Metavar("NAME:SHARE")]
LengthText = Annotated[str, BeforeValidator(as_text), AfterValidator(_check_lengths), Metavar("LENGTH")]


class WorkloadSettings(BaseModel):
    """The requests: their prompts and the length of their answers."""

    workload: WorkloadName = Field("synthetic", description="Source of the prompts.")
    input_tokens: LengthText | None = Field(
        None,
        description="Prompt length, in tokens: of `synthetic`, of the part after the prefix of `shared_prefix`, of "
        f"each question of `multi_turn`. A number or {EXAMPLES}. Default {DEFAULT_INPUT_TOKENS}.",
    )
    output_tokens: LengthText | None = Field(
        None,
        description=f"Answer length, in tokens: a number or a distribution. Default {DEFAULT_OUTPUT_TOKENS}, or the "
        "trace's.",
    )
    length_pairs: FileText | None = Field(
        None,
        description="CSV file of input and output tokens; each request of `synthetic`, `shared_prefix` or `multi_turn` "
        "draws one row, instead of --input-tokens and --output-tokens.",
    )
    prefix_groups: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description=f"Number of different prefixes of `shared_prefix`. Default {DEFAULT_PREFIX_GROUPS}.",
    )
    prefix_tokens: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description=f"Length of each shared prefix, in tokens. Default {DEFAULT_PREFIX_TOKENS}.",
    )
    prefix_popularity: Literal["uniform", "zipf"] | None = Field(
        None,
        description="How often each shared prefix is used. `uniform`: all equally often. `zipf`: a few of them most of "
        "the time. Default uniform.",
    )
    turns: LengthText | None = Field(
        None,
        description="Number of questions in a `multi_turn` session: a number or a distribution. Default "
        f"{DEFAULT_TURNS}.",
    )
    assistant: Literal["scripted", "real"] = Field(
        "scripted",
        description="Earlier answers in the later prompts of `multi_turn`. `scripted`: words of the requested "
        "length, equal for equal seeds. `real`: the server's answers.",
    )
    prefix_cache: Literal["natural", "cold", "warm"] = Field(
        "natural",
        description="State of the server's prefix cache: unchanged (`natural`), without hits (`cold`: every prompt "
        "begins with different words), with every shared prefix (`warm`: each is sent once before the load).",
    )
    structured: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Fraction of the requests whose answer must follow a JSON schema. Every answer is checked; the "
        "report has the share of valid ones, and separate latencies of these and of the other requests.",
    )
    structured_tools: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Fraction of the structured requests that call a tool instead of following a schema. Default 0.",
    )
    schemas_file: FileText | None = Field(
        None, description="JSONL file of objects with `name` and `schema`, drawn evenly. Default three small schemas."
    )
    adapter: Annotated[tuple[AdapterText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description=f"LoRA adapter and the fraction of the requests that use it, as in {ADAPTER_EXAMPLE}; "
        "repeatable. The other requests use the base model. Native requests have it as `adapter_id`, others as "
        "`model`.",
    )
    adapters: Annotated[str, accepted_by(parse_names), Metavar("NAMES")] | None = Field(
        None,
        description="LoRA adapters, as a,b,c. Each request uses one of them: all equally often, or by --adapter-zipf.",
    )
    adapter_zipf: float | None = Field(
        None,
        ge=0,
        le=10,
        description="Exponent of a Zipf distribution over --adapters: the first is used most often. Default 0: all "
        "equally often.",
    )
    images: int | None = Field(
        None, ge=1, le=64, description="Images of every request: synthetic PNG files, as data URLs before the text."
    )
    image_size: Annotated[str, accepted_by(parse_size), Metavar("WxH")] | None = Field(
        None, description=f"Width and height of each image in pixels. Default {DEFAULT_IMAGE_SIZE}."
    )
    images_shared: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Fraction of the images that are one of {SHARED_IMAGES} images, which the server may cache. "
        "Default 0: every image is new.",
    )
    stream: bool = Field(True, description="Request streamed answers. Blocking calls have no TTFT, TPOT or gaps.")
    length_control: Literal["auto", "forced", "capped"] = Field(
        "auto",
        description="Length of answers: exactly the requested one (`forced`, if the server supports it), or at most "
        "that one (`capped`). `auto`: forced if possible.",
    )
