"""The cases of `make gpu-dry`: a new model or wiring is one row. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Words = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One rank of a deployment. `layers` of the model are kept, which decides neither a step's peak nor a layer's
    launches. `words`: of its config.json, where that is no Llama's. `fp8`: as the model's published fp8 checkpoint.
    `stages`: of a pipeline, all of which run. `late`: whether all graphs but the first wait for their first use, of a
    model in one stage."""

    name: str
    model: str
    tp: int
    nodes: int = 1
    wiring: str = "standard"
    fp8: bool = False
    strategy: Literal["flat", "two_level", "one_shot"] = "flat"
    stages: int = 1
    layers: int = 4
    words: Words = field(default_factory=dict)
    length: int = 16384
    parallel: Words = field(default_factory=dict)
    engine: Words = field(default_factory=dict)
    late: bool = False

    @property
    def recorded(self) -> bool:
        """Whether its decode steps are CUDA graphs: FlashInfer or our kernels compute its attention."""
        return self.engine.get("attention") != "torch"

    @property
    def draws_recorded(self) -> bool:
        """Whether greedy and plainly sampled rows are drawn in graphs too."""
        return self.recorded and self.stages == 1 and not self.parallel.get("deterministic")

    @property
    def mixes(self) -> bool:
        """Whether its steps with prompts are CUDA graphs too."""
        return self.recorded and "split_steps" not in self.parallel

    @property
    def dense(self) -> bool:
        return not self.words and not self.parallel.get("deterministic")

    @property
    def drafts(self) -> bool:
        return "speculation" in self.engine

    @property
    def seats(self) -> int:
        return int(self.engine.get("max_num_seqs", 256))


_SPREAD = {"expert_layout": "spread", "dense_path": "node"}
_DRAFTS = {"speculation": "ngram", "max_num_seqs": 16}
_QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
_DEEPSEEK_V3 = _LATENT | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 5, "num_attention_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "vocab_size": 129280,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
_DEEPSEEK_V3_FP8 = _DEEPSEEK_V3 | {
    "num_hidden_layers": 6, "first_k_dense_replace": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_DEEPSEEK_V32_FP8 = _DEEPSEEK_V3_FP8 | {
    "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
_GLM5 = _LATENT | {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 5, "num_attention_heads": 64,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 154880, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "indexer_types": ["full", "shared", "full", "shared", "shared"],
}  # fmt: skip
_KIMI_INT4 = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "vocab_size": 163840,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"0": {"weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32,
        }}},
    },
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_LONGCAT = _LATENT | {
    "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 2, "num_attention_heads": 64,
    "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256,
    "moe_topk": 12, "vocab_size": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
}  # fmt: skip
_LANEFORMER = {
    "model_type": "laneformer_tp", "architectures": ["LaneformerTPForCausalLM"], "hidden_size": 3072,
    "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 12288,
    "vocab_size": 32000, "max_position_embeddings": 4096, "num_lanes": 8, "broadcast_delay": 2,
    "sliding_window": 512, "sliding_window_n_layers": 4, "torch_dtype": "bfloat16",
}  # fmt: skip

CASES = (
    Case("8B", "llama-3.1-8b", 1),
    Case("70B, tp 8", "llama-3.1-70b", 8),
    Case("405B, tp 16", "llama-3.1-405b", 16, 2),
    Case("405B fp8, tp 8", "llama-3.1-405b", 8, fp8=True),
    Case("405B, tp 8 x pp 2", "llama-3.1-405b", 8, stages=2),
    Case("405B ladder, tp 16", "llama-3.1-405b", 16, 2, "ladder"),
    Case("8B parallel, tp 8", "llama-3.1-8b", 8, wiring="parallel"),
    Case("8B delay-2, tp 8", "llama-3.1-8b", 8, wiring="delay-2"),
    Case("8B deterministic, tp 8", "llama-3.1-8b", 8, parallel={"deterministic": True}),
    Case("70B fp8 KV, tp 8", "llama-3.1-70b", 8, engine={"kv_cache_dtype": "fp8"}),
    Case("405B two-level, tp 16", "llama-3.1-405b", 16, 2, strategy="two_level"),
    Case("70B one-shot, tp 8", "llama-3.1-70b", 8, strategy="one_shot", engine={"max_num_seqs": 64}),
    Case("70B one-shot, tp 16", "llama-3.1-70b", 16, 2, strategy="one_shot", engine={"max_num_seqs": 64}),
    Case("70B split steps, tp 8", "llama-3.1-70b", 8, parallel={"split_steps": "always"}),
    Case("70B, graphs at first use, tp 8", "llama-3.1-70b", 8, late=True),
    Case("Qwen3-235B, tp 8", "qwen3-235b-a22b", 8, words=_QWEN3_235B),
    Case("Qwen3-235B spread, 2 x 8", "qwen3-235b-a22b", 16, 2, words=_QWEN3_235B, parallel=_SPREAD),
    Case("DeepSeek-V3 spread, 2 x 8", "deepseek-v3", 16, 2, words=_DEEPSEEK_V3, parallel=_SPREAD),
    Case("DeepSeek-V3 fp8, tp 8 x pp 2", "deepseek-v3", 8, fp8=True, stages=2, layers=6, words=_DEEPSEEK_V3_FP8),
    Case("DeepSeek-V3.2 fp8, tp 8 x pp 2", "deepseek-v3.2", 8, fp8=True, stages=2, layers=6, words=_DEEPSEEK_V32_FP8),
    Case("GLM-5 spread, 2 x 8", "glm-5", 16, 2, words=_GLM5, parallel=_SPREAD),
    Case("Kimi-K2.5 INT4 spread, 2 x 8", "kimi-k2.5", 16, 2, words=_KIMI_INT4, parallel=_SPREAD),
    Case("gpt-oss-120b MXFP4, tp 8", "gpt-oss-120b", 8, words=_GPT_OSS),
    Case("LongCat-Flash spread, 2 x 8", "longcat-flash", 16, 2, words=_LONGCAT, parallel=_SPREAD),
    Case("Laneformer 2B, tp 8", "laneformer-2b", 8, words=_LANEFORMER, length=4096, engine={"attention": "torch"}),
    Case("405B drafts, tp 16", "llama-3.1-405b", 16, 2, engine=_DRAFTS),
    Case("DeepSeek-V3 drafts, 2 x 8", "deepseek-v3", 16, 2, words=_DEEPSEEK_V3, parallel=_SPREAD, engine=_DRAFTS),
    Case(
        "DeepSeek-V3 mtp, 2 x 8",
        "deepseek-v3",
        16,
        2,
        words=_DEEPSEEK_V3 | {"num_nextn_predict_layers": 1},
        parallel=_SPREAD,
        engine=_DRAFTS | {"speculation": "mtp"},
    ),
    Case("8 lanes, heads of 128, tp 2", "", 2, words=_LANEFORMER | {"hidden_size": 4096}, length=4096),
)

RANKS = (
    "405B, tp 16", "405B two-level, tp 16", "70B one-shot, tp 16", "405B, tp 8 x pp 2", "8B deterministic, tp 8",
    "LongCat-Flash spread, 2 x 8", "GLM-5 spread, 2 x 8",
)  # fmt: skip
"""Cases whose collectives are compared over all ranks."""
CAPABILITIES = (80, 90, 100, 120)
"""Every Triton kernel is compiled for these; what computes in fp8 from 89 on."""

Kind = Literal["greedy", "temperature", "top_p"]
DRAWS: dict[Kind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
