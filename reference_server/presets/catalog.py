"""The built-in models: `preset:NAME` -> the files of a model that needs no network.

Each has a real architecture's published shapes. `tiny-llama` and the heads that draft for it are trained and ship their
weights; the others are loaded with seeded random ones. All share one tokenizer, which is smaller than most of their
vocabularies.
"""

from dataclasses import dataclass
from pathlib import Path

from reference_server.errors import UnsupportedError

PREFIX = "preset:"
_ROOT = Path(__file__).parent
CALIBRATION_TEXT = _ROOT / "calibration.txt"
"""Text of the kind that `tiny-llama` was trained on and has not seen: what a preset is calibrated on."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One built-in model.

    `directory` holds config.json, generation_config.json and, if `has_weights`, the weights;
    `tokenizer_directory` holds tokenizer.json and tokenizer_config.json with a chat template.
    """

    name: str
    description: str

    @property
    def model_id(self) -> str:
        return PREFIX + self.name

    @property
    def directory(self) -> Path:
        return _ROOT / self.name

    @property
    def tokenizer_directory(self) -> Path:
        return _ROOT / "tokenizer"

    @property
    def has_weights(self) -> bool:
        return any(self.directory.glob("*.safetensors"))


PRESETS = (
    Preset("tiny-llama", "Llama, 2 million parameters, 16,384 positions, trained on small English documents"),
    Preset("llama-125m", "Llama at the size of GPT-2 small: 12 layers, hidden 768, vocabulary 32,000"),
    Preset("bloom-560m", "BLOOM 560M: 24 layers, hidden 1,024, 16 heads with ALiBi, vocabulary 250,880"),
    Preset("llama-3.2-1b", "Llama 3.2 1B: 16 layers, hidden 2,048, 32 heads on 8 K/V heads, tied embedding"),
    Preset("llama-3.1-8b", "Llama 3.1 8B: 32 layers, hidden 4,096, 32 heads on 8 K/V heads"),
    Preset("qwen2.5-7b", "Qwen2.5 7B: 28 layers, hidden 3,584, 28 heads on 4 K/V heads"),
)

SPECULATORS = (Preset("tiny-llama-medusa", "four Medusa heads, trained to draft for tiny-llama; served with it"),)
"""Heads, whose config names the model that they are served with."""


ADAPTERS = ("exclaim", "bullets")
"""LoRA adapters of `tiny-llama`: sentences end with an exclamation mark, or are lines that begin with a dash."""


def find_adapter(location: str) -> Path | None:
    """The directory of the built-in adapter that `preset:NAME` names; None for any other location.

    Raises UnsupportedError, listing the names there are, for a `preset:` name that is not one of them.
    """
    if not location.startswith(PREFIX):
        return None
    name = location.removeprefix(PREFIX)
    if name in ADAPTERS:
        return _ROOT / "adapters" / name
    names = ", ".join(PREFIX + each for each in ADAPTERS)
    raise UnsupportedError(f"there is no built-in adapter {location!r}; there are {names}")


def find(model_id: str) -> Preset | None:
    """The preset that `preset:NAME` names; None for any other kind of model id.

    Raises UnsupportedError, listing the names there are, for a `preset:` id that is not one of them.
    """
    if not model_id.startswith(PREFIX):
        return None
    for preset in (*PRESETS, *SPECULATORS):
        if preset.model_id == model_id:
            return preset
    names = ", ".join(preset.model_id for preset in (*PRESETS, *SPECULATORS))
    raise UnsupportedError(f"there is no built-in model {model_id!r}; there are {names}")
