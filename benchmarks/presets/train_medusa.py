"""Trains the Medusa heads of `preset:tiny-llama-medusa` on the text of `preset:tiny-llama`, whose weights do not
change.

    python benchmarks/presets/train_medusa.py --steps 1500 --minutes 8
    python benchmarks/presets/train_medusa.py --steps 1500 --minutes 8 --resume --seed 1

Head i has the same input as the output head at position t, and learns the distribution of the base model at position t
+ 1 + i, so a draft follows the base model's choice and not the text. Training stops at the first of its two limits;
Ctrl-C stops it and saves. `--resume` continues from the saved heads; use another seed. The last lines are the accepted
shares on held-out text, by place.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.presets.train_tiny import (  # noqa: E402
    HELD_OUT_SEED,
    MODEL,
    PRESETS,
    TOKENIZER,
    TRAIN_SEED,
    LearningRateSchedule,
    corpus,
    run_steps,
)

HEADS = PRESETS / "tiny-llama-medusa"
NUM_HEADS = 4
NEARER_WEIGHT = 0.8
"""Weight of a head's loss, relative to that of the head before it, whose token has to be accepted first."""


class MedusaHead(nn.Module):
    """One residual block and an output matrix of its own, as in Medusa V1; begins as the base model's output head."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        vocab_size, hidden_size = output.shape
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.output = nn.Linear(hidden_size, vocab_size, bias=False)
        self.output.weight.data.copy_(output)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden]; returns [tokens, vocab_size]."""
        logits: Tensor = self.output(hidden + F.silu(self.linear(hidden)))
        return logits


def train(
    steps: int, minutes: float, batch_size: int, seq_len: int, learning_rate: float, seed: int, resume: bool
) -> None:
    """Train the heads and write their checkpoint in TGI's layout."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    text = corpus(tokenizer, TRAIN_SEED, num_documents=60_000)
    base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)
    heads = nn.ModuleList(MedusaHead(base.lm_head.weight) for _ in range(NUM_HEADS))
    if resume:
        load(heads)
    print(f"{sum(p.numel() for p in heads.parameters()):,} parameters, {len(text):,} training tokens")
    optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    def backward(step: int, elapsed_min: float) -> None:
        starts = torch.randint(0, len(text) - seq_len, (batch_size,))
        losses = head_losses(base, heads, text[starts[:, None] + torch.arange(seq_len)])
        sum(loss * NEARER_WEIGHT**place for place, loss in enumerate(losses)).backward()
        if step % 50 == 0:
            print(f"step {step:5d}  {elapsed_min:5.1f} min  losses", *(f"{loss:.3f}" for loss in losses), flush=True)

    run_steps(LearningRateSchedule(learning_rate, steps, minutes), optimizer, backward)
    save(heads)
    held_out = corpus(tokenizer, HELD_OUT_SEED, num_documents=400)
    for place, share in enumerate(accepted_shares(base, heads, held_out, seq_len), 1):
        print(f"place {place}: {share:.1%} of the drafts are accepted up to here")


def head_losses(base: LlamaForCausalLM, heads: nn.ModuleList, window: Tensor) -> list[Tensor]:
    """The cross entropy of each head with the base model's distribution. window: [rows, tokens] int64."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            hidden = base.model(input_ids=window, use_cache=False).last_hidden_state
            targets = base.lm_head(hidden).float().softmax(-1)
        losses = []
        for place, head in enumerate(heads, 1):
            logprobs = head(hidden[:, :-place]).float().log_softmax(-1)
            losses.append(-(targets[:, place:] * logprobs).sum(-1).mean())
    return losses


@torch.inference_mode()
def accepted_shares(base: LlamaForCausalLM, heads: nn.ModuleList, text: Tensor, seq_len: int) -> list[float]:
    """Of all positions, the share at which the heads up to each place choose the base model's next greedy tokens."""
    windows = text[: len(text) // seq_len * seq_len].view(-1, seq_len)
    hidden = base.model(input_ids=windows, use_cache=False).last_hidden_state
    chosen = base.lm_head(hidden).argmax(-1)
    places = seq_len - len(heads)
    accepted = torch.ones(len(windows), places, dtype=torch.bool)
    shares = []
    for place, head in enumerate(heads, 1):
        # Only where the text continues with the choice of the base model: elsewhere its next state differs.
        follows = windows[:, place : place + places] == chosen[:, place - 1 : place - 1 + places]
        accepted &= head(hidden[:, :places]).argmax(-1) == chosen[:, place : place + places]
        shares.append(float((accepted & follows).sum() / follows.sum()))
    return shares


def named_weights(heads: nn.ModuleList) -> dict[str, nn.Parameter]:
    """The parameters by their names in TGI's layout."""
    found = {}
    for number, head in enumerate(heads):
        own = {"0.linear.weight": head.linear.weight, "0.linear.bias": head.linear.bias, "1.weight": head.output.weight}
        found |= {f"{number}.{name}": weight for name, weight in own.items()}
    return found


def load(heads: nn.ModuleList) -> None:
    """Continue from the saved heads."""
    saved = load_file(HEADS / "medusa_lm_head.safetensors")
    for name, weight in named_weights(heads).items():
        weight.data.copy_(saved[name])


def save(heads: nn.ModuleList) -> None:
    """Write config.json and medusa_lm_head.safetensors in bfloat16."""
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in named_weights(heads).items()}
    config = {"base_model_name_or_path": "preset:tiny-llama", "medusa_num_heads": len(heads), "medusa_num_layers": 1}
    HEADS.mkdir(exist_ok=True)
    (HEADS / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    temporary = HEADS / "medusa_lm_head.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(HEADS / "medusa_lm_head.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
