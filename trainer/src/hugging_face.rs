//! Our config in the words of Hugging Face's `config.json`: the standard MiniMax keys, and ours whole under `hone`, which
//! alone is read back. Foreign configs are not read here.

use serde_json::{Value, json};

use crate::config::{Mixer, ModelConfig, Norm, Router};

/// The content of `config.json`.
pub(crate) fn config(c: &ModelConfig, end: u32) -> Value {
    let mixers: Vec<Mixer> = (0..c.layers).map(|l| c.mixer(l)).collect();
    let softmax = |m: &Mixer| *m == Mixer::Softmax;
    let (alpha, beta) = match c.norm {
        Norm::Pre => (1.0, 1.0),
        Norm::Post { alpha, beta } => (alpha, beta),
    };
    let (model_type, architecture) = model_type(c);
    json!({
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "scoring_func": match c.router { Router::Softmax => "softmax", Router::SigmoidBias => "sigmoid" },
        "use_routing_bias": c.router == Router::SigmoidBias,
        "use_qk_norm": c.qk_norm,
        "rope_theta": c.rope_theta,
        "rotary_dim": c.rotary_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dim as f64 / c.head_dim as f64,
        },
        "layer_types": mixers.iter().map(|m| if softmax(m) { "full_attention" } else { "linear_attention" }).collect::<Vec<_>>(),
        "attn_type_list": mixers.iter().map(|m| u8::from(softmax(m))).collect::<Vec<_>>(),
        "block_size": c.block,
        "postnorm": c.norm != Norm::Pre,
        "full_attn_alpha_factor": alpha,
        "full_attn_beta_factor": beta,
        "linear_attn_alpha_factor": alpha,
        "linear_attn_beta_factor": beta,
        "mlp_alpha_factor": alpha,
        "mlp_beta_factor": beta,
        "bos_token_id": end,
        "eos_token_id": end,
        "hone": c,
    })
}

/// The content of `generation_config.json`.
pub(crate) fn generation_config(end: u32) -> Value {
    json!({ "bos_token_id": end, "eos_token_id": end, "do_sample": true, "temperature": 1.0 })
}

/// Hugging Face's `model_type` and architecture where its code computes this config, else ours.
fn model_type(c: &ModelConfig) -> (&'static str, &'static str) {
    // transformers' MiniMax: post-norm with the normalised residual, softmax router, RoPE on whole heads, slopes 2^(-8h/H) also
    // where H is no power of two.
    let minimax = c.norm != Norm::Pre
        && c.experts > 0
        && c.router == Router::Softmax
        && !c.qk_norm
        && c.rotary_dim == c.head_dim
        && c.heads.is_power_of_two();
    let m2 = c.norm == Norm::Pre
        && c.experts > 0
        && c.router == Router::SigmoidBias
        && c.qk_norm
        && c.softmax_layers() == c.layers;
    match (minimax, m2) {
        (true, _) => ("minimax", "MiniMaxForCausalLM"),
        (_, true) => ("minimax_m2", "MiniMaxM2ForCausalLM"),
        _ => ("hone", "HoneForCausalLM"),
    }
}
