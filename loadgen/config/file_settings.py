"""Settings of files of prompts and of traces: the rows and columns to use."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from loadgen.config.setting_types import FileText, as_tuple

DEFAULT_SHAREGPT_ROWS = 1_000


class FileSettings(BaseModel):
    """The files of a workload, and the part of them to use."""

    trace_file: FileText | None = Field(
        None, description="CSV or JSONL file of an `azure_llm`, `burstgpt` or `mooncake` trace."
    )
    trace_limit: int | None = Field(
        None,
        ge=1,
        description="Number of requests of the trace to use, after --trace-skip. Default all, of `sharegpt` "
        f"{DEFAULT_SHAREGPT_ROWS}.",
    )
    trace_skip: int = Field(
        0, ge=0, description="Number of requests at the start of the trace (or of `sharegpt`) to skip."
    )
    trace_loop: bool = Field(False, description="Repeat the trace until --duration or --requests end the run.")
    trace_model: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="Only rows of `burstgpt` with this Model, such as ChatGPT; repeatable."
    )
    trace_log_type: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description='Only rows of `burstgpt` with this Log Type, such as "API log"; repeatable.'
    )
    block_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="Prompt tokens for each hash of a `mooncake` trace. Default 512."
    )
    min_input_tokens: int | None = Field(
        None, ge=1, description="Skip requests of a trace or of `sharegpt` with prompts of fewer tokens."
    )
    max_input_tokens: int | None = Field(None, ge=1, description="Skip requests with prompts of more tokens.")
    min_output_tokens: int | None = Field(None, ge=1, description="Skip requests with answers of fewer tokens.")
    max_output_tokens: int | None = Field(None, ge=1, description="Skip requests with answers of more tokens.")
    time_scale: float = Field(
        1.0, gt=0, le=1_000, description="Multiplies every arrival time of a trace: 0.05 is 20 times faster."
    )
    prompts_file: FileText | None = Field(
        None,
        description="File of prompts: JSONL (`prompt`, `text`, `inputs` or `messages`), CSV with such a column, or "
        "one prompt in each line; for `sharegpt`, its JSON file.",
    )
    prompt_column: str | None = Field(
        None, description="Key or column of the prompts in --prompts-file. Default the first of prompt, text, inputs."
    )
    output_tokens_column: str | None = Field(
        None, description="Key or column of --prompts-file that holds the length of each answer."
    )
    prompts_order: Literal["file", "shuffled"] = Field(
        "file", description="Order of the prompts of a file: as in the file, or shuffled by --seed."
    )
    tokenizer: FileText | None = Field(
        None,
        description="tokenizer.json (or its directory) that counts prompt tokens instead of the server's /tokenize.",
    )
