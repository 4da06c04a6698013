"""Longer runs of typical architectures on hybrid meshes: FP8 beside plain bf16 on one process."""

import json

import pytest
from tiny_runs import job as plain_job
from tiny_runs import losses

from bf16_products import Float32Products
from octavo.train.checkpoint.retention import checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = {
    "cohere": (WITHOUT_HEAD_DIM | {"logit_scale": 1.0, "num_hidden_layers": 4}, {"pp": 2, "tp": 2}),
    "mixtral": (SHAPE | EXPERTS, {"ep": 2}),
    "qwen3_moe": (WITHOUT_HEAD_DIM | SMALL | {"num_experts": 4}, {"tp": 2}),
    "deepseek_v3": (WITHOUT_HEAD_DIM | LATENT | SMALL | DEEPSEEK, {"ep": 2}),
}
STEPS, SEEDS = 200, (1, 2, 3)


def tables(family, seed, cache, level="bf16", parallel=None):
    config, _ = MODELS[family]
    return {
        "run": {"steps": STEPS, "seed": seed, "device": "cpu"}, "model": {"type": family, "config": config},
        "data": {"source": "python-stdlib", "sequence_length": 64, "vocab_size": 300, "cache": str(cache)},
        "optim": {"lr": 1e-3, "batch": 8, "micro_batches": 2, "warmup": 20}, "precision": {"level": level},
        "parallel": parallel or {},
    }  # fmt: skip


def job(tables, out):
    with Float32Products():
        return plain_job(tables, out)


def final(out):
    values = losses(out)
    assert len(values) == STEPS
    return sum(values[-20:]) / 20


@pytest.mark.parametrize("family", MODELS)
def test_fp8_on_a_hybrid_mesh_is_within_the_noise_of_seeds(gloo, tmp_path, family):
    """At least 95 % of the matrix weights in FP8; the gap to bf16 is less than bf16's own spread over seeds."""
    cache, parallel = tmp_path / "cache", MODELS[family][1]
    plain = {}
    for seed in SEEDS:
        job(tables(family, seed, cache), tmp_path / f"bf16-{seed}")
        plain[seed] = final(tmp_path / f"bf16-{seed}")
    results = gloo.run(job, 4, tables(family, 1, cache, "fp8", parallel), str(tmp_path / "fp8"), timeout=3000)
    spread = max(plain.values()) - min(plain.values())
    gap = final(tmp_path / "fp8") - plain[1]
    share = int(results[0].converted.split("% of the matrix weights")[0].rpartition("(")[2])
    print(json.dumps({"model": family, **parallel, "bf16": plain, "gap": gap, "spread": spread, "fp8": share}))
    assert share >= 95 and abs(gap) < spread
    assert checkpoints(tmp_path / "fp8")
