"""Diffusion transformers with their text encoders, for memory_random.py: the configs of random models, and the shapes of their tensors."""


def linear(tensors, name, inputs, outputs, bias=True):
    tensors[f"{name}.weight"] = [outputs, inputs]
    if bias:
        tensors[f"{name}.bias"] = [outputs]


def embedder(tensors, name, inputs, width):
    linear(tensors, f"{name}.linear_1", inputs, width)
    linear(tensors, f"{name}.linear_2", width, width)


def projections(tensors, name, width, head, parts, norms):
    for part in parts:
        linear(tensors, f"{name}.{part}", width, width)
    for norm in norms:
        tensors[f"{name}.{norm}.weight"] = [head]


IMAGE = (["to_q", "to_k", "to_v"], ["norm_q", "norm_k"])
TEXT = (["add_q_proj", "add_k_proj", "add_v_proj"], ["norm_added_q", "norm_added_k"])


def feed_forward(tensors, name, width):
    linear(tensors, f"{name}.net.0.proj", width, 4 * width)
    linear(tensors, f"{name}.net.2", 4 * width, width)


def flux_tensors(config):
    tensors, head = {}, config["attention_head_dim"]
    width = head * config["num_attention_heads"]
    linear(tensors, "x_embedder", config["in_channels"], width)
    linear(tensors, "context_embedder", config["joint_attention_dim"], width)
    embedder(tensors, "time_text_embed.timestep_embedder", 256, width)
    if config["guidance_embeds"]:
        embedder(tensors, "time_text_embed.guidance_embedder", 256, width)
    embedder(tensors, "time_text_embed.text_embedder", config["pooled_projection_dim"], width)
    for i in range(config["num_layers"]):
        at = f"transformer_blocks.{i}"
        linear(tensors, f"{at}.norm1.linear", width, 6 * width)
        linear(tensors, f"{at}.norm1_context.linear", width, 6 * width)
        projections(tensors, f"{at}.attn", width, head, *IMAGE)
        projections(tensors, f"{at}.attn", width, head, *TEXT)
        linear(tensors, f"{at}.attn.to_out.0", width, width)
        linear(tensors, f"{at}.attn.to_add_out", width, width)
        feed_forward(tensors, f"{at}.ff", width)
        feed_forward(tensors, f"{at}.ff_context", width)
    for i in range(config["num_single_layers"]):
        at = f"single_transformer_blocks.{i}"
        linear(tensors, f"{at}.norm.linear", width, 3 * width)
        projections(tensors, f"{at}.attn", width, head, *IMAGE)
        linear(tensors, f"{at}.proj_mlp", width, 4 * width)
        linear(tensors, f"{at}.proj_out", 5 * width, width)
    linear(tensors, "norm_out.linear", width, 2 * width)
    linear(tensors, "proj_out", width, config["in_channels"])
    return tensors


def sd3_tensors(config):
    tensors, head = {}, config["attention_head_dim"]
    width, table = head * config["num_attention_heads"], config["pos_embed_max_size"]
    tensors["pos_embed.proj.weight"] = [width, config["in_channels"], 2, 2]
    tensors["pos_embed.proj.bias"] = [width]
    tensors["pos_embed.pos_embed"] = [1, table * table, width]
    embedder(tensors, "time_text_embed.timestep_embedder", 256, width)
    embedder(tensors, "time_text_embed.text_embedder", config["pooled_projection_dim"], width)
    linear(tensors, "context_embedder", config["joint_attention_dim"], width)
    last = config["num_layers"] - 1
    for i in range(last + 1):
        at, dual = f"transformer_blocks.{i}", i in config["dual_attention_layers"]
        linear(tensors, f"{at}.norm1.linear", width, (9 if dual else 6) * width)
        linear(tensors, f"{at}.norm1_context.linear", width, (2 if i == last else 6) * width)
        projections(tensors, f"{at}.attn", width, head, *IMAGE)
        projections(tensors, f"{at}.attn", width, head, *TEXT)
        linear(tensors, f"{at}.attn.to_out.0", width, width)
        if dual:
            projections(tensors, f"{at}.attn2", width, head, *IMAGE)
            linear(tensors, f"{at}.attn2.to_out.0", width, width)
        feed_forward(tensors, f"{at}.ff", width)
        if i < last:
            linear(tensors, f"{at}.attn.to_add_out", width, width)
            feed_forward(tensors, f"{at}.ff_context", width)
    linear(tensors, "norm_out.linear", width, 2 * width)
    linear(tensors, "proj_out", width, 4 * config["in_channels"])
    return tensors


def zimage_tensors(config):
    tensors, width = {}, config["dim"]
    head, features, hidden = width // config["n_heads"], min(width, 256), int(width / 3 * 8)
    linear(tensors, "all_x_embedder.2-1", 4 * config["in_channels"], width)
    tensors["cap_embedder.0.weight"] = [config["cap_feat_dim"]]
    linear(tensors, "cap_embedder.1", config["cap_feat_dim"], width)
    linear(tensors, "t_embedder.mlp.0", 256, 1024)
    linear(tensors, "t_embedder.mlp.2", 1024, features)
    tensors["x_pad_token"] = tensors["cap_pad_token"] = [1, width]
    for name, count in (("noise_refiner", "n_refiner_layers"), ("context_refiner", "n_refiner_layers"), ("layers", "n_layers")):
        for i in range(config[count]):
            at = f"{name}.{i}"
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                linear(tensors, f"{at}.attention.{part}", width, width, bias=False)
            for norm in ("norm_q", "norm_k"):
                tensors[f"{at}.attention.{norm}.weight"] = [head]
            for part, inputs, outputs in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
                linear(tensors, f"{at}.feed_forward.{part}", inputs, outputs, bias=False)
            for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
                tensors[f"{at}.{norm}.weight"] = [width]
            if name != "context_refiner":
                linear(tensors, f"{at}.adaLN_modulation.0", features, 4 * width)
    linear(tensors, "all_final_layer.2-1.linear", width, 4 * config["in_channels"])
    linear(tensors, "all_final_layer.2-1.adaLN_modulation.1", features, width)
    return tensors


def t5_tensors(config):
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    tensors = {"shared.weight": [config["vocab_size"], width], "encoder.final_layer_norm.weight": [width]}
    first = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tensors[first] = [config["relative_attention_num_buckets"], config["num_heads"]]
    for i in range(config["num_layers"]):
        at = f"encoder.block.{i}.layer"
        for part, inputs, outputs in (("q", width, inner), ("k", width, inner), ("v", width, inner), ("o", inner, width)):
            linear(tensors, f"{at}.0.SelfAttention.{part}", inputs, outputs, bias=False)
        for part, inputs, outputs in (("wi_0", width, config["d_ff"]), ("wi_1", width, config["d_ff"]), ("wo", config["d_ff"], width)):
            linear(tensors, f"{at}.1.DenseReluDense.{part}", inputs, outputs, bias=False)
        for layer in (0, 1):
            tensors[f"{at}.{layer}.layer_norm.weight"] = [width]
    return tensors


def qwen3_tensors(config):
    width, head, wide = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": [config["vocab_size"], width], "model.norm.weight": [width]}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for part, inputs, outputs in (
            ("self_attn.q_proj", width, queries), ("self_attn.k_proj", width, keys), ("self_attn.v_proj", width, keys),
            ("self_attn.o_proj", queries, width), ("mlp.gate_proj", width, wide), ("mlp.up_proj", width, wide),
            ("mlp.down_proj", wide, width),
        ):  # fmt: skip
            linear(tensors, f"{at}.{part}", inputs, outputs, bias=False)
        for norm, size in (("self_attn.q_norm", head), ("self_attn.k_norm", head), ("input_layernorm", width), ("post_attention_layernorm", width)):
            tensors[f"{at}.{norm}.weight"] = [size]
    return tensors


def t5_config(width, layers, heads):
    return {
        "architectures": ["T5EncoderModel"], "d_model": width, "d_kv": 64, "d_ff": 5 * width // 2, "num_layers": layers,
        "num_heads": heads, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu", "vocab_size": 32128,
        "layer_norm_epsilon": 1e-6, "model_type": "t5",
    }  # fmt: skip


def qwen3_config(width, layers, heads, kv_heads):
    return {
        "architectures": ["Qwen3Model"], "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64, "hidden_act": "silu", "vocab_size": 30000,
        "model_type": "qwen3", "rope_theta": 1000000.0,
    }  # fmt: skip


def flux_config(heads, blocks, single, text, pooled, guidance=True):
    return {
        "_class_name": "FluxTransformer2DModel", "in_channels": 64, "attention_head_dim": 128, "num_attention_heads": heads,
        "num_layers": blocks, "num_single_layers": single, "joint_attention_dim": text, "pooled_projection_dim": pooled,
        "guidance_embeds": guidance, "axes_dims_rope": [16, 56, 56], "patch_size": 1,
    }  # fmt: skip


def sd3_config(heads, blocks, text, pooled, dual, table):
    return {
        "_class_name": "SD3Transformer2DModel", "sample_size": 64, "in_channels": 16, "out_channels": 16, "patch_size": 2,
        "attention_head_dim": 64, "num_attention_heads": heads, "caption_projection_dim": 64 * heads, "num_layers": blocks,
        "joint_attention_dim": text, "pooled_projection_dim": pooled, "dual_attention_layers": list(range(dual)),
        "qk_norm": "rms_norm", "pos_embed_max_size": table,
    }  # fmt: skip


def zimage_config(heads, blocks, text):
    return {
        "_class_name": "ZImageTransformer2DModel", "in_channels": 16, "dim": 128 * heads, "n_heads": heads, "n_kv_heads": heads,
        "n_layers": blocks, "n_refiner_layers": 1, "cap_feat_dim": text, "axes_dims": [32, 48, 48], "axes_lens": [1024, 512, 512],
        "all_patch_size": [2], "all_f_patch_size": [1], "qk_norm": True, "norm_eps": 1e-5, "rope_theta": 256.0, "t_scale": 1000.0,
    }  # fmt: skip
