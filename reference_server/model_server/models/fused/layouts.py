"""Names and structure of the decoders that `fuse` recognises, one `Layout` each."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a decoder's modules; a dotted name is the path of a nested module.

    inner: the model without its head. up: one linear, or gate and up. positions: a position table, added to the
    embedding. rotary: the module whose angles rotate queries and keys. by_head: one linear gives query, key and value
    of a head side by side. is_gated: the MLP multiplies up by an activated gate. query_norm, key_norm: over each head.
    attended_norm, mlp_norm: of the results of attention and MLP, before they are added to the residual.
    """

    inner: str
    embedding: str
    layers: str
    final_norm: str
    attention: str
    qkv: tuple[str, ...]
    output: str
    input_norm: str
    post_norm: str | None
    up: tuple[str, ...]
    activation: str
    down: str
    positions: str | None = None
    embedding_norm: str | None = None
    rotary: str | None = None
    by_head: bool = False
    is_gated: bool = False
    query_norm: str | None = None
    key_norm: str | None = None
    attended_norm: str | None = None
    mlp_norm: str | None = None

    @property
    def inner_parts(self) -> set[str]:
        parts = (self.embedding, self.layers, self.final_norm, self.positions, self.embedding_norm, self.rotary)
        return {part for part in parts if part is not None}

    @property
    def layer_norms(self) -> list[str]:
        norms = (self.input_norm, self.post_norm, self.attended_norm, self.mlp_norm)
        return [norm for norm in norms if norm is not None]

    @property
    def head_norms(self) -> list[str]:
        return [norm for norm in (self.query_norm, self.key_norm) if norm is not None]

    @property
    def layer_parts(self) -> set[str]:
        """Every module of a layer, by its path."""
        mlp = {*self.up, self.activation, self.down}
        parts = {self.attention, *self.layer_norms, *mlp}
        parts |= {f"{self.attention}.{part}" for part in (*self.qkv, self.output, *self.head_norms)}
        return parts | {path.rpartition(".")[0] for path in mlp if "." in path}


LLAMA = Layout(
    "model", "embed_tokens", "layers", "norm", "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj",
    "input_layernorm", "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.act_fn", "mlp.down_proj",
    rotary="rotary_emb", is_gated=True,
)  # fmt: skip
PHI3 = replace(LLAMA, qkv=("qkv_proj",), up=("mlp.gate_up_proj",), activation="mlp.activation_fn")
GLM = replace(LLAMA, up=PHI3.up, activation=PHI3.activation)


def _with_more_norms(layout: Layout) -> list[Layout]:
    """The layout with norms over each head (Qwen 3), with norms of the added results (Gemma 2), and with both."""
    normed_deltas = replace(
        layout,
        post_norm="pre_feedforward_layernorm",
        attended_norm="post_attention_layernorm",
        mlp_norm="post_feedforward_layernorm",
    )
    return [replace(each, query_norm="q_norm", key_norm="k_norm") for each in (layout, normed_deltas)] + [normed_deltas]


GPT2 = Layout(
    "transformer", "wte", "h", "ln_f", "attn", ("c_attn",), "c_proj", "ln_1", "ln_2",
    ("mlp.c_fc",), "mlp.act", "mlp.c_proj", positions="wpe",
)  # fmt: skip
# GPT-BigCode with a K/V head for each query head.
GPT2_BY_HEAD = replace(GPT2, by_head=True)
BLOOM = Layout(
    "transformer", "word_embeddings", "h", "ln_f", "self_attention", ("query_key_value",), "dense",
    "input_layernorm", "post_attention_layernorm", ("mlp.dense_h_to_4h",), "mlp.gelu_impl", "mlp.dense_4h_to_h",
    embedding_norm="word_embeddings_layernorm", by_head=True,
)  # fmt: skip
OPT = Layout(
    "model.decoder", "embed_tokens", "layers", "final_layer_norm", "self_attn",
    ("q_proj", "k_proj", "v_proj"), "out_proj", "self_attn_layer_norm", "final_layer_norm",
    ("fc1",), "activation_fn", "fc2", positions="embed_positions",
)  # fmt: skip
GPT_NEOX = Layout(
    "gpt_neox", "embed_in", "layers", "final_layer_norm", "attention", ("query_key_value",), "dense",
    "input_layernorm", "post_attention_layernorm", ("mlp.dense_h_to_4h",), "mlp.act", "mlp.dense_4h_to_h",
    rotary="rotary_emb", by_head=True,
)  # fmt: skip
PHI = Layout(
    "model", "embed_tokens", "layers", "final_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj"),
    "dense", "input_layernorm", None, ("mlp.fc1",), "mlp.activation_fn", "mlp.fc2", rotary="rotary_emb",
)  # fmt: skip
STARCODER2 = Layout(
    "model", "embed_tokens", "layers", "norm", "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj",
    "input_layernorm", "post_attention_layernorm", ("mlp.c_fc",), "mlp.act", "mlp.c_proj", rotary="rotary_emb",
)  # fmt: skip
GATED = tuple(each for layout in (LLAMA, PHI3, GLM) for each in (layout, *_with_more_norms(layout)))
LAYOUTS = (*GATED, GPT2, GPT2_BY_HEAD, BLOOM, OPT, GPT_NEOX, PHI, STARCODER2)
