"""octavo.plan: any model, any device, decided linear by linear, time and memory; a 70B one in seconds."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from models import llama
from test_step_memory import FAST
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import Precision, plan
from octavo.kernels.calibration import Entry
from octavo.kernels.timing import bf16_gemms
from octavo.nn import filters
from octavo.parallel import Parallel
from octavo.runtime.torch_compat import fake_process_group


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
    times = speed.times[up.name]
    assert up.converted and up.recipe == "rowwise" and up.gain == pytest.approx(times.bf16 / times.planned)
    assert "8192×2048×8192" in up.reason
    head = by_name["lm_head"]
    assert not head.converted and head.gain == 1.0
    assert head.reason.startswith("vocabulary head") and "by cost: " in head.reason
    assert speed.planned.seconds < speed.bf16.seconds
    saved = sum(time.bf16 - time.planned for time in speed.times.values())
    assert speed.bf16.seconds - speed.planned.seconds == pytest.approx(saved)
    assert speed.planned.tokens == 8192
    assert speed.parameters == sum(p.numel() for p in wide.parameters())


@pytest.mark.thorough
def test_fused_kernels_move_fewer_bytes_in_eager_steps(wide):
    precision = Precision(matmul="bf16", activations="fused")
    plain, fused = (plan(wide, 4, 2048, device="h100", precision=p) for p in (Precision.level("bf16"), precision))
    assert fused.planned.rest < 0.6 * fused.bf16.rest and fused.bf16.rest == plain.planned.rest
    assert fused.planned.waiting <= plain.planned.waiting and fused.planned.linears == plain.planned.linears
    assert fused.memory.largest["activations"] < 0.75 * fused.bf16_memory.largest["activations"]
    few, fewer = (plan(wide, 1, 64, device="h100", precision=p).planned for p in (Precision.level("bf16"), precision))
    assert fewer.seconds > few.seconds  # where the host sets the pace: each fused kernel takes it several operations
    compiled = plan(wide, 4, 2048, device="h100", precision=precision, compiled=True)  # whose graphs fuse by themselves
    assert compiled.planned.rest == compiled.bf16.rest
    fp8 = plan(wide, 4, 2048, device="h100", precision=Precision(activations="fused"))
    assert fp8.planned.rest == fused.planned.rest and fp8.converted and fp8.activations == "fused"
    assert octavo.Plan.from_json(fp8.to_json()).activation_modules == fused.activation_modules


def test_convert_does_what_was_planned():
    model = llama()
    speed = plan(model, 2, 16, device=FAST)
    assert isinstance(speed, octavo.Plan) and speed.converted
    octavo.convert(model, plan=speed, verbose=False)
    report = octavo.report(model)
    assert [row.name for row in report if row.converted] == [r.name for r in speed.rows if r.converted]
    assert report[0].reason == speed.rows[0].reason
    assert type(model.octavo_plan) is octavo.Plan  # and holds no predictions, whose model it would keep alive
    with pytest.raises(ValueError, match="converted already"):
        plan(model, 2, 16)


def test_heads_by_cost_and_skipped_layers(wide):
    speed = plan(wide, 4, 8192, heads=True, skip=["*.q_proj", "*.0.*"])
    by_name = {row.name: row for row in speed.rows}
    assert by_name["lm_head"].recipe == plan(wide, 4, 8192, heads=True).rows[-1].recipe
    assert not by_name["lm_head"].reason.startswith("vocabulary head")
    assert by_name["model.layers.1.self_attn.q_proj"].reason.startswith("skipped by pattern '*.q_proj'; by cost: ")
    assert not by_name["model.layers.0.mlp.up_proj"].converted and by_name["model.layers.1.mlp.up_proj"].converted


@pytest.mark.thorough
def test_settings_reach_the_step(wide):
    plain = plan(wide, 1, 1024)
    assert plan(wide, 1, 1024, checkpointing="full").bf16.linears > plain.bf16.linears
    assert plan(wide, 1, 1024, micro_batches=4).bf16.tokens == 4096
    assert plan(wide, 1, 1024, compiled=True).bf16.rest < plain.bf16.rest
    lean = plan(wide, 1, 1024, precision=Precision.level("fp8+activations+optimizer", recipe="auto"))
    assert lean.planned.optimizer < lean.bf16.optimizer == plain.bf16.optimizer
    assert plan(wide, 1, 1024, world_size=8).bf16.tokens == 8192
    assert {row.recipe for row in plan(wide, 8, 2048, recipe="tensorwise").rows} == {"tensorwise", None}


def test_printed_and_as_json(wide):
    speed = plan(wide, 8, 2048, world_size=8)
    text = str(speed)
    for part in ("predicted, not measured: H100 SXM", "Peaks: NVIDIA H100 data sheet, 2023. ", "bf16 0.76",
                 "measured on NVIDIA H100 80GB HBM3 (torch 2.11", "assumed: attention 0.40",
                 "model.layers.{0-1}.mlp.up_proj", "linear layers, ms", "total, ms", "tokens/s", "MFU", "FP8 pays",
                 "parameters", "gradients", "optimizer states", "activations", "temporaries", "largest that fits",
                 "memory of each GPU", "It fits"):  # fmt: skip
        assert part in text, part
    content = json.loads(speed.to_json())
    assert content["gain"] == pytest.approx(speed.gain) and len(content["rows"]) == len(speed.rows)
    assert content["planned"]["memory"]["peak"] == speed.memory.peak == sum(speed.memory.at_peak.values())
    assert content["planned"]["memory"]["largest_batch"] == speed.largest_batch > 8
    assert content["bf16"]["memory"]["fits"] is True and content["setting"]["gpus"] == 8
    read = octavo.Plan.from_json(speed.to_json())
    assert read == octavo.Plan(speed.decisions) and read.rows == speed.rows
    assert f"{speed.gain:.2f}× bf16" in speed.summary


ASKED = {"batch": 2, "seq": 8}
MISTAKES = [
    ({"batch": 2}, TypeError, "plan takes batch and seq"),
    ({"batch": {"n": 7}}, ValueError, "contains no tensor and no shape"),
    ({"batch": {"input_ids": (2, 3, 4)}}, ValueError, r"cannot run a batch of shapes \[\[2, 3, 4\]\]"),
    ({"batch": (2, 8)}, ValueError, r"no tensor and no shape: \(2, 8\). Pass .* plan\(model, 4, 2048\)"),
    (ASKED | {"batch": 0}, ValueError, "batch is an integer of 1 or more; got 0"),
    (ASKED | {"batch": True}, ValueError, "batch is an integer of 1 or more; got True"),
    (ASKED | {"seq": -1}, ValueError, "seq is an integer of 1 or more"),
    (ASKED | {"device": "h1000"}, ValueError, "unknown GPU 'h1000'.*did you mean 'h100'"),
    (ASKED | {"recipe": "rowwize"}, ValueError, "did you mean 'rowwise'"),
    (ASKED | {"checkpointing": "ful"}, ValueError, "did you mean 'full'"),
    (ASKED | {"world_size": 0}, ValueError, "gpus is an integer of 1 or more"),
    (ASKED | {"world_size": True}, ValueError, "gpus is an integer of 1 or more; got True"),
    (ASKED | {"world_size": 8, "parallel": Parallel(dp_replicate=3)}, ValueError, "dp_replicate = 3"),
    (ASKED | {"world_size": 8, "parallel": Parallel(dp_replicate=8, cpu_offload=True)}, ValueError, "offload needs sh"),
    (ASKED | {"precision": "bf16"}, TypeError, "precision is an octavo.Precision.*got 'bf16'"),
    (ASKED | {"parallel": {"tp": 2}}, TypeError, "got {'tp': 2}. Tensor, sequence.* not predicted"),
    (ASKED | {"micro_batches": 0}, ValueError, "micro_batches is an integer of 1 or more"),
    (ASKED | {"skip": "a"}, TypeError, r"write skip=\['a'\]"),
    (ASKED | {"calibration": "none.json"}, ValueError, "cannot read the calibration from none.json"),
    (ASKED | {"recipe": "rowwise", "precision": Precision()}, ValueError, "precision includes recipe"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), MISTAKES, ids=str)
def test_mistakes(arguments, error, message):
    with pytest.raises(error, match=message):
        plan(llama(), **arguments)


def test_models_that_cannot_be_planned():
    message = "plan takes a torch.nn.Module, the model itself; got a str. For a file: octavo plan CONFIG"
    with pytest.raises(TypeError, match=message):
        plan("gpt2", 2, 16)
    with pytest.raises(ValueError, match="no parameter of this model requires a gradient"):
        plan(llama().requires_grad_(False), 2, 16)
    model = llama()
    with fake_process_group(2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match=r"weight is a DTensor.* tensor, .* not predicted"):
            plan(model, 2, 16)


def test_weights_that_cannot_travel_in_fp8_are_refused_as_a_run_would():
    arguments = {"device": FAST, "world_size": 16, "recipe": "blockwise"}
    with pytest.raises(ValueError, match=r"fp8_comm='on' with recipe blockwise.* Nearest: recipe 'rowwise'"):
        plan(llama(), 2, 16, **arguments, parallel=Parallel(fp8_comm="on"))
    assert plan(llama(), 2, 16, **arguments, parallel=Parallel(fp8_comm="auto")).converted


def test_filters_and_precision_say_what_stays(wide):
    by_name = {row.name: row for row in plan(wide, 4, 8192, filter=filters.name("*.mlp.*")).rows}
    assert by_name["model.layers.0.mlp.up_proj"].converted
    assert not by_name["model.layers.0.self_attn.q_proj"].converted
    assert "; by cost: " in by_name["model.layers.0.self_attn.q_proj"].reason
    last = {row.name: row.converted for row in plan(wide, 4, 8192, precision=Precision(skip_last=1)).rows}
    assert last["model.layers.0.mlp.up_proj"] and not last["model.layers.1.mlp.up_proj"]
    bf16 = plan(wide, 4, 8192, precision=Precision.level("bf16"))
    assert not bf16.converted and bf16.gain == 1.0 and "precision level bf16; by cost: " in bf16.rows[0].reason
    assert bf16.memory.at_peak == bf16.bf16_memory.at_peak


@pytest.mark.thorough
def test_what_does_not_fit_says_how_much_would(wide):
    gpu = {"like": "h100", "memory_gib": 4}
    tight = plan(wide, 64, 2048, device=gpu)
    assert not tight.fits and 1 <= tight.largest_batch < 64
    assert f"the largest forward that fits has {tight.largest_batch} sequences on each GPU" in str(tight)
    assert plan(wide, tight.largest_batch, 2048, device=gpu).fits
    assert not plan(wide, tight.largest_batch + 1, 2048, device=gpu).fits
    none = plan(wide, 1, 2048, device={"like": "h100", "memory_gib": 1.5})
    assert none.largest_batch == 0 and "not even one sequence fits" in str(none)


@pytest.mark.thorough
def test_many_gpus_share_what_is_held(wide):
    one, eight = (plan(wide, 1, 2048, world_size=world).memory.at_peak for world in (1, 8))
    for kind in ("parameters", "optimizer states"):
        assert eight[kind] == pytest.approx(one[kind] / 8, rel=0.01)
    assert eight["gathered"] > one["gathered"] == 0
    copies = plan(wide, 1, 2048, world_size=8, parallel=Parallel(dp_replicate=8)).memory.at_peak
    assert copies["parameters"] == one["parameters"]
    assert copies["gathered"] == pytest.approx(one["parameters"], rel=0.01)  # DDP's buckets
    away = plan(wide, 1, 2048, world_size=8, parallel=Parallel(cpu_offload=True)).memory.at_peak
    assert away["parameters"] == away["optimizer states"] == 0
    fp8 = plan(wide, 1, 2048, world_size=8, parallel=Parallel(fp8_comm="on"))
    assert fp8.step_config.fp8_gather and fp8.step_config.fp8_reduce
    assert fp8.memory.at_peak["gathered"] < eight["gathered"] and not fp8.step_config.bf16.fp8_gather


def test_a_calibration_goes_before_the_data_sheet(wide, tmp_path):
    file = tmp_path / "h100.json"
    made = [
        Entry(op="matmul", case=what.case, shape=what.shape, backend="torch", config=None, microseconds=1.0)
        for what in bf16_gemms([(8192, 2048, 8192)])
    ]
    table = {"format": 2, "device": "NVIDIA H100 80GB HBM3", "entries": [asdict(each) for each in made]}
    file.write_text(json.dumps(table))
    measured = plan(wide, 4, 2048, device="h100", calibration=file, compiled=True)
    by_name = {row.name: row for row in measured.rows}
    up, down = by_name["model.layers.0.mlp.up_proj"], by_name["model.layers.0.mlp.down_proj"]
    assert not up.converted and "bf16 0.003 ms measured" in up.reason  # nothing beats a microsecond
    assert down.converted and "measured" not in down.reason
    assert measured.times[up.name].bf16 == pytest.approx(3e-6)
    assert "times marked measured are of such a GPU" in str(measured)
    assert "Measured: 3 times on NVIDIA H100 80GB HBM3;" in str(measured)
    with pytest.raises(ValueError, match="measured on NVIDIA H100 80GB HBM3, not on H200 SXM"):
        plan(wide, 4, 2048, device="h200", calibration=file)
    json.loads(measured.to_json())


@pytest.mark.slow
def test_llama_3_70b_takes_seconds():
    code = (
        "import resource, time, torch; from transformers import LlamaConfig, LlamaForCausalLM; import octavo.inspect\n"
        "config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256,\n"
        "                     num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192)\n"
        "start = time.process_time()\n"
        "with torch.device('meta'): model = LlamaForCausalLM(config).bfloat16()\n"
        "level = octavo.Precision.level('fp8+activations+optimizer', recipe='auto')\n"
        "plan = octavo.plan(model, 1, 8192, device='h100', world_size=64, precision=level, checkpointing='full')\n"
        "text = str(plan)\n"
        "print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, plan.fits,\n"
        "      plan.largest_batch, plan.memory.traced_blocks[1], plan.summary)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, gib, fits, largest, blocks, summary = out.split(maxsplit=5)
    assert float(seconds) < 10
    assert float(gib) < 4
    assert (fits, blocks) == ("True", "80") and 1 < int(largest) < 8
    assert summary.startswith("560 of 561 linear layers in rowwise; predicted on 64 × H100 SXM")
