"""The requests of the adapter routes, field for field as vLLM's."""

from pydantic import BaseModel, Field

from reference_server.adapter_source import MAX_NAME_CHARACTERS

MAX_PATH_CHARACTERS = 4096


class LoadAdapterRequest(BaseModel):
    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS, description="The `model` of later requests.")
    lora_path: str = Field(
        min_length=1,
        max_length=MAX_PATH_CHARACTERS,
        description="A directory below `--adapter-directory`, absolute or relative to it; or a built-in adapter.",
    )
    load_inplace: bool = Field(False, description="Replace the loaded adapter of this name.")


class UnloadAdapterRequest(BaseModel):
    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS, description="A loaded adapter.")
    lora_int_id: int | None = Field(None, description="Not used.")
