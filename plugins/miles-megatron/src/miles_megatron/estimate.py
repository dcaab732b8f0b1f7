"""What a rank of the trainer holds at its peak, from config.json and the layout: its half of the memory plan;
and the operations of a sequence.

Layers are Transformer Engine's, micro-batches are packed. What a layer keeps for its backward pass is written out in
`saved_activations`, name by name; tests/gpu/trainer_speed.py compares the sums with what torch counts. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_local.muon_options import LAYER_WISE, MUON

from miles_core.config.load import shape_json
from miles_core.config.tables import RunConfig
from miles_megatron.architecture import Architecture, sparse_layers
from miles_megatron.heads import Compressed, OfLayers, embedded, heads_of, mean_ffn, sizes_of, streams_of
from miles_megatron.layout import Layout, cuts_groups, layout_of

FP32 = 4
WORKSPACES = 128 * 2**20
"""Scratch memory of cuBLAS, Transformer Engine and cuDNN."""

_QK_NORM = ("qwen3", "gemma3", "gemma4", "olmo")
"""Beginnings of model types whose queries and keys pass a norm; config.json does not say so."""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """What the plan needs to know of a checkpoint, and how it is laid out.

    Args:
        size: its constants; nothing may be `uncounted`.
        value: bytes of a weight and of an activation.
        tied: the output layer is the embedding.
        qk_norm: queries and keys pass a norm.
        softcap: the logits pass one.
        norms_after: norms of a layer that outputs pass before they join the residual.
        side_by_side: a dense MLP is beside the experts of a layer, each between norms of its own.
        sparse_before: how many of the first 0, 1, 2, ... layers are mixtures of experts; empty where it is not known.
    """

    size: Architecture
    layout: Layout
    value: int
    tied: bool
    qk_norm: bool
    softcap: bool = False
    norms_after: int = 0
    side_by_side: bool = False
    sparse_before: tuple[int, ...] = ()

    @property
    def split(self) -> int:
        """Ranks among which sequence parallelism splits norms and residuals."""
        return self.layout.tensor if self.layout.sequence_parallel else 1


def dimensions_of(config: RunConfig) -> ModelDimensions | None:
    """None where config.json leaves out what the plan needs."""
    size = sizes_of(config)
    hf_config = shape_json(config)[1] or {}
    if size.uncounted or not size.checkpoint:
        return None
    family = str(hf_config.get("model_type", ""))
    return ModelDimensions(size=size, layout=layout_of(config), value=2 if config.perf.bf16 else FP32,
                 tied=bool(hf_config.get("tie_word_embeddings")),
                 qk_norm=bool(hf_config.get("use_qk_norm") or family.startswith(_QK_NORM)),
                 softcap=bool(hf_config.get("final_logit_softcapping")), norms_after=hf_config.get("norms_after", 0),
                 side_by_side=bool(hf_config.get("enable_moe_block")), sparse_before=tuple(
                     sparse_layers(hf_config, count) for count in range(size.layers + 1)) if size.sparse else ())


def saved_activations(model: ModelDimensions, sparse: bool) -> dict[str, float]:
    """Bytes per token that one layer keeps until its backward pass, by what they are.

    A norm keeps its input and 1 / rms in fp32; a linear layer its input; attention q, k and v after the rope,
    its output (which is the input of the layer behind it) and the log of the softmax's normaliser.
    """
    size, value = model.size, model.value
    tensor = model.layout.tensor
    hidden, statistic = value * size.hidden / model.split, FP32 / model.split
    # Of the average layer, as everything below.
    kinds = [(one, one.layers / size.layers) for one in heads_of(size)]
    cut = 1 if isinstance(size, Compressed) else tensor
    query = sum(share * value * size.heads * one.head_dim / cut for one, share in kinds)
    key = sum(share * value * max(one.groups, cut) * one.head_dim / cut for one, share in kinds)
    values, output = (part * size.value_dim / size.head_dim for part in (key, query))
    normalisers = sum(share * FP32 * (size.heads + max(one.groups, tensor)) / tensor for one, share in kinds)
    latents = value * ((size.query_rank or 0) + (size.rank or 0)) / model.split
    # Linear attention is computed again from its inputs.
    linear, full, (keys, inner) = size.linear / size.layers, size.full / size.layers, size.linear_widths
    mixers, mlps, own = linear + full, 1.0 if sparse else _dense(size), value * embedded(size) / model.split
    activations = {
        "attention norm: input": mixers * (hidden + statistic),
        "qkv: input": mixers * hidden,
        "norms of q and k: inputs": (query + key + normalisers) * model.qk_norm,
        "latents: inputs of norms and projections": 2 * latents,
        "attention: q, k, v": query + key + values,
        "attention: q, k, v of all ranks, where some share keys": cuts_groups(model.layout, size) * sum(
            share * value * (size.heads + one.made * one.groups) * one.head_dim for one, share in kinds
            if tensor > one.groups),
        "attention's gate: gate, gated output": 2 * output * bool(size.gated),
        "attention: output": output + full * FP32 * size.heads / tensor,
        "linear attention: q, k, v, output, gate, gated output": linear * value * (2 * keys + 4 * inner) / tensor,
        "mlp norm: input": mlps * (hidden + statistic),
        "norms after attention and mlp: inputs": model.norms_after * (hidden + statistic),
        # The embedding and the norm that it has passed, the gate before and after its activation, their product.
        "further embedding: inputs": bool(own) * (2 * hidden + statistic) + 5 * own,
        **_of_streams(model),
    }
    wide = size.matrices - 1  # of what the activation is made, in widths of what it makes
    if not sparse:
        inner = mlps * value * mean_ffn(size) / tensor
        return activations | {"fc1: input": mlps * hidden, "activation: input": wide * inner, "fc2: input": inner}
    # Copies of a token are those of its experts; expert-tensor-parallel ranks each see all of their tokens.
    copies = size.experts_per_token * model.layout.expert_tensor / model.split
    inner = value * size.expert_ffn / model.layout.expert_tensor
    return activations | {
        "router: input": hidden,
        "router: logits, probabilities, choices": (3 * FP32 + 1) * size.experts / model.split,
        "latents: inputs of their projections": (hidden + value * size.latent / model.split) if size.latent else 0,
        "experts' fc1: input": copies * value * (size.latent or size.hidden),
        "experts' activation: input": copies * wide * inner,
        "experts' probabilities: input": copies * inner,
        "experts' fc2: input": copies * inner,
        "shared experts": (2 + wide) * value * (size.shared_ffn or 0) / tensor,
        # What the dense MLP sees and what the norms after both see; the two norms before both keep one input.
        "mlps side by side: inputs": (3 * hidden + 4 * statistic) * model.side_by_side,
    }


def _of_streams(model: ModelDimensions) -> dict[str, float]:
    """What a layer of several streams keeps beside the rest."""
    size, value = model.size, model.value
    if isinstance(size, OfLayers) and size.streams > 1:
        hidden = value * size.hidden / model.split
        # Streams as they come, predicted and corrected; what the router sees of one twice, and the shortcut's output.
        return {"streams: inputs, predicted, corrected": 3 * size.streams * hidden, "router and shortcut": 3 * hidden}
    if not isinstance(size, Compressed):
        return {}
    rounded = value * (value < FP32)  # where it is kept beside its copy in fp32
    return {
        # Of each of the two connections: the streams, and in fp32 what they are divided by and the quotient.
        "streams: inputs of connections": 2 * size.streams * size.hidden * (2 * FP32 + rounded) / model.split,
        "norm of queries: input": size.heads * size.head_dim * (FP32 + rounded),
        "compressed keys: keys and shares": 4 * size.head_dim * (FP32 + rounded),
    }


def parameters(model: ModelDimensions, layers: float, first: bool, last: bool,
               sparse: float | None = None) -> tuple[float, float]:
    """(dense, experts') parameters of one rank that holds so many layers, and the ends of the model or not.

    Args:
        sparse: how many of the layers are mixtures of experts; by default as many as on average.
    """
    size, tensor = model.size, model.layout.tensor
    sparse = layers * size.sparse / size.layers if sparse is None else sparse
    cut, whole = mixing(size)
    attention = cut / tensor + whole
    norms = (size.full + size.linear + size.mlps) / size.layers * size.hidden
    of_heads = sum(one.layers * one.head_dim for one in heads_of(size)) / max(size.full, 1)
    norms += 2 * of_heads * model.qk_norm + (size.query_rank or 0) + (size.rank or 0)
    table = size.vocab * size.hidden / tensor
    matrix = size.matrices * size.hidden
    dense = layers * (attention + norms) + (layers - sparse) * _dense(size) * matrix * mean_ffn(size) / tensor
    dense += sparse * (size.hidden * (size.experts or 0) + matrix * (size.shared_ffn or 0) / tensor)
    dense += sparse * 2 * size.hidden * (size.latent or 0)
    if isinstance(size, OfLayers) and (own := size.embedded):
        dense += layers * (2 * own + 1) * size.hidden
        dense += first * (size.layers * own * (size.words / tensor + size.hidden) + own)
        dense += layers * size.joining + (first + last) * (size.streams - 1) * size.hidden**2
    dense += table * (first + (last and not (first and model.tied))) + size.hidden * last
    each = size.matrices * (size.latent or size.hidden) * (size.expert_ffn or 0) / model.layout.expert_tensor
    return dense, sparse * each * (size.experts or 0) / model.layout.expert


def _dense(size: Architecture) -> float:
    """Of the layers without experts, the share with an MLP: all, but where layers are attention or an MLP alone."""
    return (size.mlps - size.sparse) / max(size.layers - size.sparse, 1)


def trainer(config: RunConfig, model: ModelDimensions) -> dict[str, float]:
    """Bytes of a rank at its peak, which is in a micro-batch's backward pass; of the pipeline's fullest stage."""
    stages = model.layout.pipeline
    candidates = [_stage(config, model, stage) for stage in {0, min(1, stages - 1), stages - 1}]
    return max(candidates, key=lambda parts: sum(parts.values()))


def layers_of(config: RunConfig, model: ModelDimensions, stage: int) -> float:
    """Of a stage: what Megatron's options say of the first and the last, and even shares of the rest."""
    stages, megatron = model.layout.pipeline, config.surface("megatron")
    ends = {at: megatron.get(f"num_layers_in_{end}_pipeline_stage") for at, end in ((0, "first"), (stages - 1, "last"))}
    stated = [count for count in ends.values() if count]
    return ends.get(stage) or (model.size.layers - sum(stated)) / max(stages - len(stated), 1)


def _sparse_of(config: RunConfig, model: ModelDimensions, stage: int) -> float:
    """Mixtures of experts of a stage, which is the first, the second or the last: where the first layers are dense, the
    later stages have more than the average."""
    size, layout, layers = model.size, model.layout, layers_of(config, model, stage)
    if not model.sparse_before or layers != int(layers) or layout.virtual_pipeline:
        return layers * size.sparse / size.layers
    last = stage == layout.pipeline - 1
    begin = int(size.layers - layers) if last else int(layers_of(config, model, 0)) if stage else 0
    return model.sparse_before[begin + int(layers)] - model.sparse_before[begin]


def _stage(config: RunConfig, model: ModelDimensions, stage: int) -> dict[str, float]:
    layout, megatron = model.layout, config.surface("megatron")
    layers, last = layers_of(config, model, stage), stage == layout.pipeline - 1
    activations, passing = _activations(config, model, layers, stage, _sparse_of(config, model, stage) / layers)
    logits = _logits(config, model, _fused(config, model)) if last else 0.0
    count = sum(parameters_of(config, model, stage))
    return {
        "weights": model.value * count,
        "gradients": (FP32 if megatron.get("grad_reduce_in_fp32", True) else model.value) * count,
        "optimizer": state_of_a_rank(config, model, stage, _optimizer_bytes(config, model.value)),
        "activations": activations,
        ("logits" if logits > passing else "a layer's gradients"): max(logits, passing) + WORKSPACES,
    }


def parameters_of(config: RunConfig, model: ModelDimensions, stage: int) -> tuple[float, float]:
    """(dense, experts') parameters of one rank of a stage."""
    layers, last = layers_of(config, model, stage), stage == model.layout.pipeline - 1
    dense, sparse = parameters(model, layers, stage == 0, last, _sparse_of(config, model, stage))
    return dense + beside_embedding(config) * (stage == 0), sparse


def state_of(config: RunConfig, model: ModelDimensions, stage: int, each: float) -> tuple[float, float]:
    """Bytes of the optimizer's state of the (dense, experts') parameters of a stage, before data-parallel ranks divide
    it. Muon has no second moments of matrices of layers; norms are counted as such, too.

    Args:
        each: bytes for a parameter with Adam's two moments.
    """
    whole, matrices = parameters_of(config, model, stage), (0.0, 0.0)
    if config.optimizer.optimizer in MUON:
        layers = layers_of(config, model, stage)
        matrices = parameters(model, layers, False, False, _sparse_of(config, model, stage))
    dense, experts = (each * count - FP32 * less for count, less in zip(whole, matrices, strict=True))
    return dense, experts


def state_of_a_rank(config: RunConfig, model: ModelDimensions, stage: int, each: float) -> float:
    """The same on the data-parallel rank that has most. Layer-wise an embedding or output layer is one rank's."""
    layout, layer_wise = model.layout, config.optimizer.optimizer == LAYER_WISE
    dense, experts = state_of(config, model, stage, each)
    if not (layer_wise or config.surface("megatron").get("use_distributed_optimizer", True)):
        return dense + experts
    ends = stage in (0, layout.pipeline - 1)
    table = each * model.size.vocab * model.size.hidden / layout.tensor if layer_wise and ends else 0.0
    return max(dense / (layout.data * layout.context), table) + experts / layout.expert_data


def beside_embedding(config: RunConfig) -> int:
    """Parameters that plugins keep for the hook embedding_rows on every rank of the first stage."""
    return sum(int(word) for key, words in config.stated.items() if key.startswith("embedding_rows:") for word in words)


def _optimizer_bytes(config: RunConfig, value: int) -> float:
    """Of one parameter: the fp32 master, which an fp32 weight is itself, and Adam's two moments.

    Where moments have fewer bits, the kernel keeps of the master what the bfloat16 weight leaves out of it.
    """
    megatron = config.surface("megatron")
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", *(("main_params_dtype",) if value < FP32 else ()))
    whole = sum(_BYTES.get(str(megatron.get(name, "fp32")), FP32) for name in names)
    remainders = megatron.get("use_precision_aware_optimizer") and megatron.get("store_param_remainders", True)
    if remainders and value < FP32 and megatron.get("main_params_dtype", "fp32") == "fp32":
        whole -= value
    away = megatron.get("optimizer_offload_fraction", 1.0) if megatron.get("optimizer_cpu_offload") else 0.0
    return whole * (1 - away)


def tokens_of(config: RunConfig, layout: Layout) -> int:
    """Rows of a full micro-batch on one rank."""
    perf, rollout = config.perf, config.rollout
    if perf.use_dynamic_batch_size and perf.max_tokens_per_gpu:
        return perf.max_tokens_per_gpu
    answer, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len or 0
    longest = rollout.rollout_max_context_len or answer + prompt
    return -(-perf.micro_batch_size * longest // layout.context)


def _activations(config: RunConfig, model: ModelDimensions, layers: float, stage: int,
                 share: float) -> tuple[float, float]:
    """(kept until the backward pass, gradients and scratch of the layer that is being passed), of layers of which so
    large a share are mixtures of experts."""
    size, layout, value, megatron = model.size, model.layout, model.value, config.surface("megatron")
    tokens = tokens_of(config, layout)
    one = {sparse: sum(saved_activations(model, sparse).values()) for sparse in (False, True)
           if share != (0.0 if sparse else 1.0)}
    layer = tokens * sum(weight * one.get(sparse, 0.0) for sparse, weight in ((False, 1 - share), (True, share)))
    hidden = tokens * value * size.hidden / model.split
    stored = layers * layer
    passing = _passing(model, tokens)
    if megatron.get("recompute_granularity") == "full":
        unit, method = megatron.get("recompute_num_layers") or 1, megatron.get("recompute_method") or "uniform"
        again = min(layers, unit) if method == "block" else layers
        stored = (layers - again) * layer + again * hidden / (unit if method == "uniform" else 1)
        # What layers hand on beside one stream.
        stored += again * tokens * value * (embedded(size) + (streams_of(size) - 1) * size.hidden) / model.split
        passing += layer * (unit if method == "uniform" else 1)
    # 1F1B: a stage holds as many micro-batches as there are stages from it on; interleaved, a part of a round more.
    flying = layout.pipeline - stage
    if layout.virtual_pipeline:
        stored += layout.virtual_pipeline * hidden  # what its stages sent on stays (model._INTERLEAVED)
        flying = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline))
    end = hidden * (stage == layout.pipeline - 1) * 2  # the final norm's input, and its output as the head wants it
    return stored * flying + end, passing


def _passing(model: ModelDimensions, tokens: int) -> float:
    """Gradients of the MLP's or the attention's tensors, whichever are more; cuDNN sums up that of q in fp32."""
    size, value, tensor = model.size, model.value, model.layout.tensor
    dense = mean_ffn(size) * (size.sparse != size.mlps)
    widest = max(dense, (size.expert_ffn or 0) * (size.experts_per_token or 0))
    attention = max(one.head_dim * (value * (3 * size.heads + 2 * one.groups) + FP32 * size.heads) / tensor
                    for one in heads_of(size))
    # A block of queries, its scores for all compressed keys and their gradients (miles_specs_moe/compressed.py).
    block = 3 * FP32 * size.heads * 512 * tokens / min(filter(None, size.rates)) if isinstance(size, Compressed) else 0
    mlp = value * (tokens * (3 * widest / tensor + 2 * size.hidden / model.split) + 2 * widest * size.hidden / tensor)
    return max(mlp, tokens * attention + block)


def _fused(config: RunConfig, model: ModelDimensions) -> bool:
    """Whether fused_logits.py's kernels make the log-probs: of rounded 16-bit logits that no rank shares, uncapped."""
    plain = not model.softcap and not config.algorithm.fp32_lm_head
    return plain and model.value < FP32 and model.layout.tensor == 1


def _logits(config: RunConfig, model: ModelDimensions, fused: bool) -> float:
    """Log-probs, forward or backward, whichever is more (miles_megatron/logprob.py). Hidden states come in fp32.

    A chunk's logits exist twice in fp32, under tensor parallelism three times; the gradient of the output layer is
    summed up in fp32 and, chunk by chunk, made in the weight's dtype. The kernels have a chunk once, as it was rounded,
    and add that gradient to the layer's own, unless --overlap-grad-reduce waits for it.
    """
    size, layout, value = model.size, model.layout, model.value
    tokens, vocab, table = tokens_of(config, layout), size.vocab / layout.tensor, size.vocab * size.hidden
    chunk = min(config.perf.log_probs_chunk_size, tokens) if config.perf.log_probs_chunk_size > 0 else tokens
    alone = layout.tensor == 1
    states = tokens * size.hidden
    if fused:
        own = table * FP32 if config.surface("megatron").get("overlap_grad_reduce") else 0.0
        return chunk * vocab * value + max(states * 2 * FP32, states * value + own)
    forward = chunk * vocab * FP32 * (2 if alone else 3) + states * 2 * FP32
    logits = chunk * vocab * max((2 * FP32 if alone else FP32 + value), FP32 + value + value * size.hidden / chunk)
    return max(forward, logits + table * FP32 + states * value)


def flops(length: int, *, parameters: float, attention: float, learnt: float = 1) -> int:
    """Floating-point operations of one sequence, forward and backward, without recomputation.

        (4 + 2 x learnt) x parameters x length + 6 x attention x length^2

    A multiply-add is 2 operations and a backward pass twice a forward one. The first term is that of the matrices; the
    second that of scores and weighted values, halved because a token sees only those before it (Chowdhery et al.,
    arXiv:2204.02311, appendix B, which counts all pairs).

    Args:
        length: tokens.
        parameters: of all matrices that a token is multiplied with, the output layer's included; of a mixture of
            experts, those of the experts that a token goes to.
        attention: layers x heads x size of a head.
        learnt: share of the parameters that have a gradient; a frozen matrix only hands its input's on.
    """
    return round(2 * length * ((2 + learnt) * parameters + 3 * attention * length))


def mixing(size: Architecture) -> tuple[int, int]:
    """Parameters of the average layer's attention, linear or not: (those cut by heads, those that every tensor-parallel
    rank has)."""
    if isinstance(size, Compressed):
        return 0, size.own // size.layers
    queries = 2 * size.heads + (size.heads if size.gated else 0)
    cut, whole = size.hidden * sum(one.layers * one.head_dim * (queries + one.made * one.groups)
                                   for one in heads_of(size)), 0
    if size.rank:
        whole = size.hidden * (size.rank + size.turned + (size.query_rank or 0))
        made = size.rank * (size.plain + size.value_dim) + size.value_dim * size.hidden
        cut = size.full * size.heads * (size.head_dim * (size.query_rank or size.hidden) + made)
    keys, values = size.linear_widths
    # Queries, keys, values, the gates of the output, and two numbers per head; then the output.
    linear = size.hidden * (2 * keys + 2 * values + 2 * (size.linear_heads or 0)) + values * size.hidden
    return (cut + linear * size.linear) // size.layers, whole * size.full // size.layers


def active_parameters(size: Architecture) -> int:
    """Parameters of all matrices that one token meets: attention, MLPs, routers, its experts, the output."""
    chosen = size.matrices * (size.expert_ffn or 0) * (size.experts_per_token or 0) * (size.latent or size.hidden)
    beside = size.matrices * (size.shared_ffn or 0) + (size.experts or 0) + 2 * (size.latent or 0)
    dense = (size.mlps - size.sparse) * size.matrices * mean_ffn(size) + 3 * size.layers * embedded(size)
    return (size.layers * sum(mixing(size)) + size.sparse * (chosen + size.hidden * beside)
            + size.hidden * (round(dense) + size.vocab))
