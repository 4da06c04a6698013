"""octavo.inspect.plan: any model, any device, decided linear by linear; a 70B one in seconds."""

import json
import subprocess
import sys

import pytest
import torch
from models import llama
from torch import nn

import octavo
from octavo.inspect import plan


@pytest.fixture(scope="module")
def wide():
    with torch.device("meta"):
        return llama(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=2,
                     num_hidden_layers=2, vocab_size=1000).bfloat16()  # fmt: skip


def test_a_model_on_meta_is_decided_and_not_touched(wide):
    speed = plan(wide, 4, 2048, device="h200")
    assert next(wide.parameters()).is_meta and not hasattr(wide, "octavo_plan")
    by_name = {row.name: row for row in speed.rows}
    up = by_name["model.layers.1.mlp.up_proj"]
    assert up.converted and up.recipe == "rowwise" and up.gain == pytest.approx(up.bf16_ms / up.planned_ms)
    assert "8192×2048×8192" in up.reason
    head = by_name["lm_head"]
    assert not head.converted and head.gain == 1.0
    assert head.reason.startswith("vocabulary head") and "by cost: " in head.reason
    assert speed.planned.seconds < speed.bf16.seconds
    saved = sum(row.bf16_ms - row.planned_ms for row in speed.rows)
    assert 1e3 * (speed.bf16.seconds - speed.planned.seconds) == pytest.approx(saved)
    assert speed.planned.tokens == 8192
    assert speed.parameters == sum(p.numel() for p in wide.parameters())


def test_convert_does_what_was_planned():
    model = llama()
    speed = plan(model, 2, 16, device={"like": "h100", "launch_us": 0, "host_us": 0, "memory_tbs": 1000})
    octavo.convert(model, plan=speed.plan, verbose=False)
    assert [row.name for row in octavo.report(model) if row.converted] == [r.name for r in speed.rows if r.converted]
    assert speed.plan.converted
    with pytest.raises(ValueError, match="converted already: octavo.revert"):
        plan(model, 2, 16)


def test_heads_by_cost_and_skipped_layers(wide):
    speed = plan(wide, 4, 8192, heads=True, skip=["*.q_proj", "*.0.*"])
    by_name = {row.name: row for row in speed.rows}
    assert by_name["lm_head"].recipe == plan(wide, 4, 8192, heads=True).rows[-1].recipe
    assert not by_name["lm_head"].reason.startswith("vocabulary head")
    assert by_name["model.layers.1.self_attn.q_proj"].reason.startswith("skipped by pattern '*.q_proj'; by cost: ")
    assert not by_name["model.layers.0.mlp.up_proj"].converted and by_name["model.layers.1.mlp.up_proj"].converted


def test_settings_reach_the_step(wide):
    plain = plan(wide, 1, 1024)
    assert plan(wide, 1, 1024, checkpointing="full").bf16.linears > plain.bf16.linears
    assert plan(wide, 1, 1024, micro_batches=4).bf16.tokens == 4096
    assert plan(wide, 1, 1024, compiled=True).bf16.rest < plain.bf16.rest
    assert plan(wide, 1, 1024, states="fp8").bf16.optimizer < plain.bf16.optimizer
    assert plan(wide, 1, 1024, gpus=8).bf16.tokens == 8192
    assert {row.recipe for row in plan(wide, 8, 2048, recipe="tensorwise").rows} == {"tensorwise", None}


def test_a_batch_in_any_form_and_lora_ranks():
    with torch.device("meta"):
        down, up, head = nn.Linear(4096, 16), nn.Linear(16, 4096), nn.Linear(4096, 3)
        base = nn.Linear(4096, 4096)
    base.weight.requires_grad_(False)
    rows = {row.name: row for row in plan(nn.Sequential(base, down, up, head), torch.empty(8192, 4096)).rows}
    assert not any(rows[name].converted for name in "123")
    assert "narrow (16)" in rows["1"].reason and "narrow (3)" in rows["3"].reason
    frozen = rows["0"]
    base.weight.requires_grad_(True)
    trained = plan(base, (torch.empty(8192, 4096),)).rows[0]
    assert frozen.bf16_ms == pytest.approx(trained.bf16_ms / 2, rel=0.03)  # neither has a dgrad, the first no wgrad


def test_printed_and_as_json(wide):
    speed = plan(wide, 8, 2048, gpus=8)
    text = str(speed)
    for part in ("predicted, not measured: H100 SXM", "model.layers.{0-1}.mlp.up_proj", "tokens/s", "MFU", "FP8 pays"):
        assert part in text
    content = json.loads(speed.to_json())
    assert content["gain"] == pytest.approx(speed.gain) and len(content["rows"]) == len(speed.rows)
    assert octavo.Plan.from_json(json.dumps(content["plan"])) == speed.plan
    assert f"{speed.gain:.2f}× bf16" in speed.summary


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": 0, "seq": 8}, ValueError, "batch is a number of 1 or more; got 0"),
        ({"batch": 2, "seq": -1}, ValueError, "seq is a number of 1 or more"),
        ({"batch": 2}, TypeError, "plan takes batch and seq"),
        ({"batch": {"n": 7}}, ValueError, "holds no tensor and no shape"),
        ({"batch": {"input_ids": (2, 3, 4)}}, ValueError, r"cannot run a batch of shapes \[\[2, 3, 4\]\]"),
        ({"batch": 2, "seq": 8, "device": "h1000"}, ValueError, "unknown GPU 'h1000'.*did you mean 'h100'"),
        ({"batch": 2, "seq": 8, "recipe": "rowwize"}, ValueError, "did you mean 'rowwise'"),
        ({"batch": 2, "seq": 8, "checkpointing": "ful"}, ValueError, "did you mean 'full'"),
        ({"batch": 2, "seq": 8, "states": "fp16"}, ValueError, "states is 'fp32' or 'fp8'"),
        ({"batch": 2, "seq": 8, "gpus": 0}, ValueError, "gpus is a number of 1 or more"),
    ],
    ids=str,
)
def test_mistakes(arguments, error, message):
    with pytest.raises(error, match=message):
        plan(llama(), **arguments)


def test_llama_3_70b_takes_seconds():
    """In a process of its own: what it takes is this one's alone."""
    code = (
        "import resource, time, torch; from transformers import LlamaConfig, LlamaForCausalLM; import octavo.inspect\n"
        "config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256,\n"
        "                     num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192)\n"
        "start = time.process_time()\n"
        "with torch.device('meta'): model = LlamaForCausalLM(config).bfloat16()\n"
        "speed = octavo.inspect.plan(model, 1, 8192, device='h100', gpus=64)\n"
        "print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, speed.summary)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, gib, summary = out.split(maxsplit=2)
    assert float(seconds) < 10
    assert float(gib) < 4
    assert summary.startswith("560 of 561 linear layers in rowwise; predicted on 64 × H100 SXM")
