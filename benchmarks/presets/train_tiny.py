"""Creates the files of the presets: the byte-level BPE tokenizer, the trained weights of `preset:tiny-llama`, and the
calibration text for its quantization.

    python benchmarks/presets/train_tiny.py tokenizer
    python benchmarks/presets/train_tiny.py model --steps 2200 --minutes 24
    python benchmarks/presets/train_tiny.py calibration

`tiny_text.py` generates the text. `model` stops at the first of its two limits. The learning rate follows the nearer
limit, so it is annealed in both cases. Ctrl-C stops the training and saves the weights.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.optim import Optimizer
    from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.presets.tiny_text import ASSISTANT, BOS, COMMON, EOS, SYSTEM, USER, documents, turn  # noqa: E402

PRESETS = ROOT / "reference_server" / "presets"
TOKENIZER = PRESETS / "tokenizer"
MODEL = PRESETS / "tiny-llama"
CALIBRATION_TEXT = PRESETS / "calibration.txt"
VOCAB_SIZE = 2048
SPECIALS = ("<unk>", BOS, EOS, "<pad>", SYSTEM, USER, ASSISTANT, "<|tool|>")
TRAIN_SEED, HELD_OUT_SEED, CALIBRATION_SEED = 1, 2, 3
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer(num_documents: int) -> None:
    """Train the BPE on generated text and write tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    common = [" ".join(COMMON)] * 20
    tokenizer.train_from_iterator([*islice(documents(TRAIN_SEED), num_documents), *common], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    TOKENIZER.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TOKENIZER / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens in {TOKENIZER}")


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning rate: a warm-up, then a cosine to a fiftieth of the peak at the limit of steps or minutes."""

    peak: float
    steps: int
    minutes: float

    def progress(self, step: int, elapsed_min: float) -> float:
        return max(step / self.steps, elapsed_min / self.minutes)

    def learning_rate(self, step: int, elapsed_min: float) -> float:
        cosine = (1 + math.cos(math.pi * self.progress(step, elapsed_min))) / 2
        return self.peak * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * cosine)


def train_model(
    steps: int, minutes: float, batch_size: int, seq_len: int, learning_rate: float, seed: int, resume: bool
) -> None:
    """Train and write `model.safetensors` in bfloat16; prints the loss and a few samples.

    `resume` continues from the saved weights with a new schedule; use another seed.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    train = corpus(tokenizer, TRAIN_SEED, num_documents=60_000)
    if resume:
        model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
    else:
        model = LlamaForCausalLM(AutoConfig.from_pretrained(MODEL)).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} training tokens")
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )

    def backward(step: int, elapsed_min: float) -> None:
        starts = torch.randint(0, len(train) - seq_len - 1, (batch_size,))
        window = train[starts[:, None] + torch.arange(seq_len + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if step % 50 == 0:
            print(f"step {step:5d}  {elapsed_min:5.1f} min  loss {loss.item():.3f}", flush=True)
        if step % 250 == 249:
            save_weights(model)

    run_steps(LearningRateSchedule(learning_rate, steps, minutes), optimizer, backward)
    save_weights(model)
    _show(model.eval(), tokenizer, seq_len)


def run_steps(schedule: LearningRateSchedule, optimizer: "Optimizer", backward: Callable[[int, float], None]) -> None:
    """Step the optimizer until the end of the schedule or a signal.

    backward: computes the gradients of a step, from its number and the minutes since the start.
    """
    from torch.nn.utils import clip_grad_norm_

    interrupted = _on_interrupt()
    started = time.monotonic()
    for step in range(schedule.steps):
        elapsed_min = (time.monotonic() - started) / 60
        if schedule.progress(step, elapsed_min) >= 1 or interrupted():
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step, elapsed_min)
        optimizer.zero_grad(set_to_none=True)
        backward(step, elapsed_min)
        clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
        optimizer.step()


def corpus(tokenizer: "Tokenizer", seed: int, num_documents: int) -> "Tensor":
    """The ids of generated documents, one after the other: [tokens] int64."""
    import torch

    encoded = tokenizer.encode_batch(list(islice(documents(seed), num_documents)))
    return torch.tensor([token for document in encoded for token in document.ids])


def _on_interrupt() -> Callable[[], bool]:
    """Handle SIGINT and SIGTERM; the returned function is true after one of them. The process does not end."""
    seen: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: seen.append(number))
    return lambda: bool(seen)


def _show(model: "LlamaForCausalLM", tokenizer: "Tokenizer", seq_len: int) -> None:
    """Print the held-out loss and the continuation of three prompts."""
    import torch

    held_out = corpus(tokenizer, HELD_OUT_SEED, num_documents=400)
    with torch.inference_mode():
        windows = held_out[: len(held_out) // seq_len * seq_len].view(-1, seq_len)
        print(f"held-out loss {model(input_ids=windows, labels=windows).loss.item():.3f}")
        for prompt in ("Testing API", "What is Deep Learning?", turn(USER, "What is an API?") + f"{ASSISTANT}\n"):
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            output = model.generate(ids, max_new_tokens=80, do_sample=False)
            print(repr(tokenizer.decode(output[0].tolist(), skip_special_tokens=False)))


def save_weights(model: "LlamaForCausalLM") -> None:
    """Write the model's weights in bfloat16 to the folder of its config, atomically."""
    import torch
    from safetensors.torch import save_file

    temporary = MODEL / "model.safetensors.part"
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(MODEL / "model.safetensors")


def write_calibration_text(num_documents: int) -> None:
    """Write documents that are neither in the training text nor in the held-out text."""
    CALIBRATION_TEXT.write_text("\n\n".join(islice(documents(CALIBRATION_SEED), num_documents)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    bpe = commands.add_parser("tokenizer")
    bpe.add_argument("--num-documents", type=int, default=20_000)
    training = commands.add_parser("model")
    training.add_argument("--steps", type=int, default=2200)
    training.add_argument("--minutes", type=float, default=24.0)
    training.add_argument("--batch-size", type=int, default=16)
    training.add_argument("--seq-len", type=int, default=256)
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--resume", action="store_true")
    text = commands.add_parser("calibration")
    text.add_argument("--num-documents", type=int, default=400)
    args = vars(parser.parse_args())
    run = {"tokenizer": train_tokenizer, "model": train_model, "calibration": write_calibration_text}
    run[args.pop("command")](**args)


if __name__ == "__main__":
    main()
