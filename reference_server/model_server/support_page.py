"""The page docs/support.md, from the tables of families, quantization methods and devices."""

from collections.abc import Iterator

from reference_server.model_server.device import SERVED, UNUSED
from reference_server.model_server.models.families import FAMILIES, REFUSED, ModelFamily
from reference_server.model_server.models.generation_defaults import NEUTRAL
from reference_server.model_server.models.tensor_parallel.plans import NOT_SHARDED, PLANS
from reference_server.model_server.quantization.schemes import SCHEMES, QuantizationScheme

REFUSED_ADAPTERS = "refused: one adapter, merged"
"""How a family without `--lora-adapters` serves an adapter: as `--model-id`."""

INTRODUCTION = """# Supported models

*Served* means tested on tiny models. *Refused* means that the server exits at start and names the reason. There are no
silent fallbacks. `make docs` generates this page.

The tier of a family is the way its forward runs: *ragged* packs all sequences into one row over the paged cache,
*padded* and *encoder-decoder* pad the sequences, *recurrent* keeps one state per sequence instead of keys and values.
"""

SHARDING = """
The number of attention heads must be a multiple of the number of shards. The number of K/V heads must be a multiple or
a divisor of the number of shards; with fewer K/V heads than shards, several shards hold the same K/V head. Other inner
sizes must be multiples of the number of shards too, except the vocabulary size. The server refuses any other size and
names it. On a CPU, shards communicate with gloo: results are correct, but sharding does not make the server faster.

Several hosts share a model with `--num-nodes`, `--node-rank`, `--master-addr` and `--shard-addr` (docs/settings.md).
"""

SPECULATORS = """
`--speculate N` drafts by n-grams for every ragged family. The drafts of a speculator are accepted more often. Its
checkpoint names its base model in `base_model_name_or_path`; the base model is downloaded and served with it:

| heads | recognised by | weights |
|---|---|---|
| Medusa V1 | `medusa_num_heads` | `medusa_lm_head.safetensors` or `.pt`: blocks and an output matrix of each head |
| Medusa V2 | the same | one block of each head, without output matrices |
| MLP speculator | `model_type: mlp_speculator` | any weight files, with or without `tie_weights` and `scale_input` |

Heads are served with every ragged family, quantized or not, with several shards and both schemas. They do not change
the output. They are not quantized, and every shard holds all of them. A server with heads does not use n-grams.
Refused: more tokens than heads (`--speculate`), `--ngram-rule tgi`, a base model of another tier, heads of other sizes
than the base model's. Tokens without a draft are counted by reason in `tgi_undrafted_tokens`.

If one request runs alone on a CPU, the measured time of its steps decides whether it has drafts. With several requests
in a batch, several shards, or an accelerator, the times of the warm-up decide; they are the same on all shards.
"""

GENERATION_DEFAULTS = """A model with `is_causal: false` in its config is refused as well.

## Settings of a model's files

Only `eos_token_id` of `generation_config.json` is applied. The parameters of requests have TGI's defaults, even if the
file sets other values (`temperature`, `top_p`, ...). At start a warning names each of these settings that the file
changes:
"""

QUANTIZATION = """The server recognises a quantized checkpoint from its config, without the flag. The linears of the
layers are quantized. Embeddings, norms, the head, routers, vision towers, projectors and the experts of a mixture stay
in the compute type, as do linears that the checkpoint does not quantize. Quantized experts of a checkpoint are
dequantized at load. `/info` shows the method and, under `kernels`, the kernels of the products.

Three products round activations: `bitsandbytes`, fp8 on tensor cores, and the compiled CPU product (`int8-vnni`,
`int4-vnni`, `int8-avx2`, `int4-avx2`), which rounds to int8 with one scale for each token and group of 32 to 128
inputs. The compiled product takes int4 and int8 weights in groups of a multiple of 4 inputs or with one scale per
output. It is used in bfloat16, and in float32 on processors without AVX-512 BF16 and AMX; on a processor with them,
activations are not rounded in float32. With the compiled product the head has int8 weights too, unless several shards
divide it. On 20,480 held-out tokens of `preset:tiny-llama` the KL divergence from the bfloat16 model is 0.00032 per
token with `eetq` and 0.00551 with four bits in groups of 32. With the same weights in the layers, float products and a
plain head it is 0.00019 and 0.00545. With AVX2, where the bfloat16 model rounds less, it is 0.00015 with `eetq` and
0.00003 with float products (2,048 tokens).

The products of the GPU column were not run on a GPU yet: they are torch's, chosen by device and compute capability.
ROCm is the same, except that fp8 weights are dequantized for each product.
"""


def render_page() -> Iterator[str]:
    """The lines of the page."""
    yield INTRODUCTION
    yield "## Families\n"
    yield "| family | `model_type` | tier | several shards | quantization | LoRA adapters |"
    yield "|---|---|---|---|---|---|"
    for family in FAMILIES:
        tier = family.tier.replace("_", "-")
        cells = [family.name, f"`{family.model_type}`", tier, sharding_of(family), quantization_of(family)]
        yield f"| {' | '.join([*cells, adapters_of(family)])} |"
    others = "any other causal or sequence-to-sequence language model of Transformers"
    cells = [others, "", "padded or encoder-decoder, best effort", f"refused: {NOT_SHARDED['padded']}", "served"]
    yield f"| {' | '.join([*cells, REFUSED_ADAPTERS])} |"
    yield SHARDING
    yield "## Drafts\n"
    yield SPECULATORS.strip()
    yield "\n## Refused models\n"
    yield "| `model_type` | reason |"
    yield "|---|---|"
    for model_type, reason in REFUSED.items():
        yield f"| `{model_type}` | {reason} |"
    yield f"\n{GENERATION_DEFAULTS}{', '.join(f'`{name}`' for name in NEUTRAL)}."
    yield "\n## Quantization methods\n"
    yield QUANTIZATION
    yield "| `--quantize` | weights | checkpoint | several shards | product on a CPU | product on a GPU | needs |"
    yield "|---|---|---|---|---|---|---|"
    for scheme in SCHEMES:
        yield _row_of(scheme)
    yield "\n## Devices\n"
    yield "| device | |"
    yield "|---|---|"
    yield "| CPU | served |"
    for name, meaning in SERVED.items():
        yield f"| {meaning} (`{name}`) | served, one device per shard |"
    for name, meaning in UNUSED.items():
        yield f"| {meaning} (`{name}`) | not used: the CPU computes |"
    yield "| any other accelerator of torch | refused at start |"


def sharding_of(family: ModelFamily) -> str:
    """The table cell on sharding of a family."""
    if family.has_images:
        return "served, each with the whole vision tower"
    return "served" if family.model_type in PLANS else f"refused: {NOT_SHARDED[family.tier]}"


def quantization_of(family: ModelFamily) -> str:
    """The table cell on `--quantize` and quantized checkpoints of a family."""
    return "refused: recurrent" if family.tier == "recurrent" else "served"


def adapters_of(family: ModelFamily) -> str:
    """The table cell on `--lora-adapters` of a family; one adapter merged at start is served by all."""
    return "served" if family.tier == "ragged" else REFUSED_ADAPTERS


def _row_of(scheme: QuantizationScheme) -> str:
    checkpoints = ["any unquantized one"] if scheme.quantize is not None else []
    checkpoints += [f"`{form}`" for form in scheme.formats]
    sharded = "served" if scheme.is_sharded else "refused"
    needs = "" if scheme.package is None else f"{scheme.package} (extra `quantization`)"
    cells = [f"`{scheme.name}`", scheme.meaning, ", ".join(checkpoints), sharded, *scheme.kernels, needs]
    return f"| {' | '.join(cells)} |"
