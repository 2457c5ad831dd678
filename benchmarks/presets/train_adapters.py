"""Trains the two LoRA adapters of `preset:tiny-llama`, each one style of the text that the model was trained on.

    python benchmarks/presets/train_adapters.py exclaim --minutes 4
    python benchmarks/presets/train_adapters.py bullets --minutes 4

exclaim: every sentence ends with an exclamation mark. bullets: every sentence is a line that begins with a dash. Writes
peft's files in bfloat16 and prints the held-out loss with and without the adapter, and the continuation of a prompt.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.presets.tiny_text import documents  # noqa: E402
from benchmarks.presets.train_tiny import HELD_OUT_SEED, MODEL, PRESETS, TOKENIZER, TRAIN_SEED  # noqa: E402

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
NUM_DOCUMENTS = 8_000
PROMPT = "What is Deep Learning?"


def exclaimed(text: str) -> str:
    """Every full stop is an exclamation mark."""
    return re.sub(r"\.(?=\s|$)", "!", text)


def bulleted(text: str) -> str:
    """Every sentence is a line of a list."""
    return re.sub(r"(?<=[.!?]) +", "\n- ", text)


STYLES = {"exclaim": exclaimed, "bullets": bulleted}


class TrainedAdapter:
    """Factors for every linear of the decoder, added by hooks."""

    def __init__(self, model: Any) -> None:
        import torch

        self.factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.is_on = True
        for name, module in model.named_modules():
            if name.endswith(TARGETS):
                outputs, inputs = module.weight.shape
                a = torch.nn.Parameter(torch.randn(RANK, inputs) / math.sqrt(inputs))
                b = torch.nn.Parameter(torch.zeros(outputs, RANK))
                self.factors[name] = (a, b)
                module.register_forward_hook(self._hook(a, b))

    def _hook(self, a: "Tensor", b: "Tensor") -> Any:
        def add(_module: Any, inputs: Any, result: "Tensor") -> "Tensor":
            return result + (inputs[0] @ a.t()) @ b.t() * (ALPHA / RANK) if self.is_on else result

        return add

    def save(self, directory: Path) -> None:
        import torch
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        weights = {}
        for name, (a, b) in self.factors.items():
            weights[f"base_model.model.{name}.lora_A.weight"] = a.detach().to(torch.bfloat16).contiguous()
            weights[f"base_model.model.{name}.lora_B.weight"] = b.detach().to(torch.bfloat16).contiguous()
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_model.safetensors").chmod(0o644)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "preset:tiny-llama",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": list(TARGETS),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def corpus(tokenizer: Any, style: str, seed: int, count: int) -> "Tensor":
    import torch

    texts: Iterator[str] = (STYLES[style](text) for text in islice(documents(seed), count))
    return torch.tensor([token for each in tokenizer.encode_batch(list(texts)) for token in each.ids])


def train(style: str, steps: int, minutes: float, batch_size: int, seq_len: int, learning_rate: float) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    text = corpus(tokenizer, style, TRAIN_SEED, NUM_DOCUMENTS)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    adapter = TrainedAdapter(model)
    optimizer = torch.optim.AdamW([each for pair in adapter.factors.values() for each in pair], weight_decay=0.0)
    started = time.monotonic()
    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - started) / 60 / minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 + math.cos(math.pi * progress)) / 2
        starts = torch.randint(0, len(text) - seq_len - 1, (batch_size,))
        window = text[starts[:, None] + torch.arange(seq_len + 1)]
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    adapter.save(PRESETS / "adapters" / style)
    show(model, adapter, tokenizer, style, seq_len)


def show(model: Any, adapter: TrainedAdapter, tokenizer: Any, style: str, seq_len: int) -> None:
    """Print the held-out loss and a continuation, with and without the adapter."""
    import torch

    text = corpus(tokenizer, style, HELD_OUT_SEED, 100)
    windows = text[: len(text) // seq_len * seq_len].view(-1, seq_len)
    with torch.inference_mode():
        for adapter.is_on in (False, True):
            loss = model(input_ids=windows, labels=windows).loss.item()
            output = model.generate(torch.tensor([tokenizer.encode(PROMPT).ids]), max_new_tokens=60, do_sample=False)
            print(f"adapter {'on' if adapter.is_on else 'off'}: held-out loss {loss:.3f}")
            print(repr(tokenizer.decode(output[0].tolist(), skip_special_tokens=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
