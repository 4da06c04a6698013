"""octavo plan: what is planned from a configuration is what its trainer allocates, converts and sends."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from tiny_runs import LLAMA, MIXTRAL, ONE_BLOCK, PIPELINE, load, make_trainer, slow, trainer_of_ranks
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from collective_recorder import CollectiveRecorder
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics.plan import Plan
from octavo.planner import auto_convert, step_memory
from octavo.planner.devices import DEVICES
from octavo.planner.fake import fake_tensors
from octavo.planner.prediction import held_beside
from octavo.planner.step import StepConfig, schedule_actions, simulate
from octavo.planner.step_memory import ACTIVATIONS, BATCH, GATHERED, PARAMETERS, TEMPORARIES
from octavo.tensor import local_tensor
from octavo.train import ConfigError, load_config, parse_config, run_plan, trainer
from octavo.train.record.metrics import LOSS
from octavo.train.run_plan import plan_configured, plan_memory, plan_step, planned_task
from octavo.train.trainer import MIN_FUSED_NUMEL, Trainer, convert_run, with_activations
from support.command import octavo as command
from support.command import refused
from support.moe_models import BASE, FAMILIES
from whole_plans import all_blocks

SEVEN_B = Path(__file__).parents[2] / "configs" / "llama2-7b.toml"
SEVENTY_B = SEVEN_B.with_name("llama3-70b.toml")
DEMO, OWN_DATA = SEVEN_B.with_name("demo.toml"), SEVEN_B.with_name("own-data.toml")
RUNS = [
    {},
    {"precision": {"level": "fp8", "master": "remainder"}, "optim": {"states": "fp8"}},
    {"precision": {"level": "fp8+activations", "loss": "whole"}},
    {"precision": {"activations": "fused"}},
    {"precision": {"parameters": "fp32", "checkpointing": "full"}},
]


@pytest.mark.thorough
@pytest.mark.parametrize("changes", RUNS, ids=str)
def test_the_plan_is_what_the_trainer_has(make_config, changes):
    # The vocabulary that is trained on so little data has fewer ids than were asked for.
    config = make_config(**changes)
    trainer = make_trainer(config)
    size = trainer.model.config.vocab_size
    plan = plan_memory(make_config(**changes, model={"type": "llama", "config": LLAMA | {"vocab_size": size}}),
                       device="cpu")  # fmt: skip
    inputs, targets = trainer._batch(0)
    with saved_for_backward(trainer.model) as saved:
        loss = trainer.loss(inputs, targets)
    del loss
    trainer.train_step()
    states = {t.untyped_storage()._cdata: t.nbytes for t in tree_leaves(trainer.optimizer.state_dict())
              if isinstance(t, torch.Tensor)}  # fmt: skip
    parameters = list(trainer.model.parameters())
    assert plan.largest["parameters"] == sum(p.nbytes for p in parameters)
    assert plan.largest["optimizer states"] == sum(states.values())
    assert plan.saved == saved.bytes and plan.tokens == inputs.numel()
    assert plan.largest["gradients"] >= sum(p.nbytes for p in parameters)


@pytest.mark.thorough
def test_fused_kernels_are_planned_where_blocks_run_eagerly(make_config, monkeypatch):
    monkeypatch.setattr(trainer, "MIN_FUSED_NUMEL", 1)

    def plan(compile_mode, activations, gpu="h100", planner=plan_configured):
        return planner(make_config(run={"compile": compile_mode}, precision={"activations": activations}), gpu=gpu)

    own, fused, auto = (plan("none", activations) for activations in ("bf16", "fused", "auto"))
    assert own.time.rest > 1.5 * fused.time.rest == 1.5 * auto.time.rest
    own_bytes, *fewer = (run.memory.largest[ACTIVATIONS] for run in (own, fused, auto))
    assert 0.8 * own_bytes > fewer[0] == fewer[1]
    assert plan("auto", "auto").plan == plan("none", "auto", "a100").plan == Plan({}) != auto.plan == fused.plan
    assert plan("auto", "fused").time.rest == plan("auto", "bf16").time.rest < 0.7 * own.time.rest  # compiled
    whole = plan("none", "fused", planner=plan_step)
    assert (whole.configured.time, whole.bf16.rest) == (fused.time, own.time.rest)


@pytest.mark.slow
def test_llama_2_7b_fits_80_gb():
    plan = plan_memory(load_config(SEVEN_B))
    assert plan.largest["parameters"] == pytest.approx(2 * 6.738e9, rel=1e-3)
    assert plan.largest["optimizer states"] == pytest.approx(4.08 * 6.738e9, rel=1e-2)
    assert plan.peak < 72 * 2**30 and plan.saved / plan.tokens / 32 < 66_000
    forecast = plan_step(load_config(SEVEN_B), gpu="h100")
    assert forecast.memory.peak == pytest.approx(plan.peak, rel=0.01)
    assert forecast.fits and forecast.bf16_memory.peak > forecast.gpu.usable and forecast.largest_batch == 3


LLAMA_3_8B = ("hidden_size=4096", "intermediate_size=14336", "num_hidden_layers=32", "num_attention_heads=32")
LARGER = ["optim.batch=16", "data.sequence_length=512", "model.config.max_position_embeddings=512",
          "model.config.hidden_size=4096", "model.config.intermediate_size=14336", "model.config.num_hidden_layers=2",
          "model.config.num_attention_heads=32", "model.config.num_key_value_heads=8"]  # fmt: skip
AS_8B = ["optim.batch=1", "optim.micro_batches=1", *(f"model.config.{size}" for size in LLAMA_3_8B)]
TRACKED = {
    "7B": (SEVEN_B, ()), "7B bf16": (SEVEN_B, ("level=bf16",)), "7B recomputed": (SEVEN_B, ("checkpointing=full",)),
    "8B selective": (SEVENTY_B, ("level=fp8", "checkpointing=selective")), "demo": (DEMO, ()),
    "8B fp32, whole logits": (SEVENTY_B, ("parameters=fp32", "loss=whole", "checkpointing=none")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("path", "precision"), TRACKED.values(), ids=TRACKED)
def test_within_5_percent_of_pytorchs_tracker(path, precision):
    """The trainer's own step on all blocks, seen by PyTorch's tracker; the forecast follows two and three of them."""
    sizes = AS_8B if path == SEVENTY_B else []
    config = load_config(path, [*sizes, *(f"precision.{setting}" for setting in precision)])
    forecast = plan_step(config, gpu="h100")
    assert forecast.memory.traced_blocks == (2, config.model.config["num_hidden_layers"])
    cpu, size = torch.device("cpu"), config.optim.batch // config.optim.micro_batches
    with fake_tensors():
        task = planned_task(config)
        model = task.build(weights=False)
        decided = octavo.Plan(forecast.decisions, forecast.activations)
        trainer = Trainer(config, task.data, cpu, model, plan=decided)
        shape = size, config.data.sequence_length
        batch = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]
        step_memory.make_states(trainer.optimizer.inner)
        states = [t for t in tree_leaves(trainer.optimizer.state_dict()) if isinstance(t, torch.Tensor)]
        gradients = step_memory.make_gradients(trainer.optimizer.inner) if config.optim.micro_batches > 1 else []
        tracker = MemTracker()
        tracker.track_external(trainer.model, *batch, *states, *gradients)
        with tracker:
            trainer.accumulate(*batch, targets=batch[1].numel())
            trainer.optimizer.gradient_norm(1.0)
    whole = tracker.get_tracker_snapshot("peak")[cpu]["Total"]
    assert forecast.memory.peak == pytest.approx(whole, rel=0.05)


def test_accumulated_gradients_are_there_throughout(make_config):
    once = plan_memory(make_config(model=ONE_BLOCK, optim={"batch": 2}))
    many = plan_memory(make_config(model=ONE_BLOCK, optim={"batch": 6, "micro_batches": 3}))
    assert many.batch == once.batch == 2 and many.at_peak["gradients"] > once.at_peak["gradients"]


def test_a_local_checkpoint_is_planned_without_its_weights(tmp_path, make_config):
    fields = ONE_BLOCK["config"] | {"vocab_size": 300}
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    by_path = plan_memory(make_config(model={"path": str(tmp_path)}))
    by_type = plan_memory(make_config(model={"type": "llama", "config": fields}))
    assert by_path.at_peak == by_type.at_peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to plan: give octavo plan --memory"),
        (["--gpu", "h10"], "unknown GPU 'h10' (did you mean 'h100'?)"),
        (["--gpu", "h100", "--gpus", "0"], "gpus is an integer of 1 or more; got 0"),
        (["--gpu", "h100", "--gpus", "3", "optim.batch=8"], "cannot be shared by 3 processes evenly"),
        (["--gpu", "h100", "--memory", "--json"], "--json is for one of them at a time"),
        (["--gpu", "h100", "--calibration", "none.json"], "cannot read the calibration from none.json"),
        (["--memory", "--calibration", "none.json"], "--calibration needs --gpu, the GPU that was measured"),
        (["--gpu", "h100", "optim.btach=8"], "did you mean 'batch'"),
        (["--memory", "--device", "gpu"], "device is cuda or cpu; got 'gpu'"),
        (["--memory", "--limit", "0"], "--limit is the memory of the device in GiB"),
        (["--memory", "--limit", "inf"], "--limit is the memory of the device in GiB"),
        (["--gpu", "h100", "--limit", "-1"], "--limit is the memory of the device in GiB, above 0; got -1"),
        (["--gpu", "h100", "--limit", "24"], "--limit is for --memory"),
        (["--gpu", "h100", "--layers"], "--layers is for --memory"),
        (["--memory", "optim.btach=8"], "did you mean 'batch'"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    refused(command("plan", DEMO, *arguments), message)


SHIPPED = [path for path in sorted(SEVEN_B.parent.glob("*.toml")) if load_config(path).data.task == "language"]
MEASURED = (DEMO, SEVEN_B, SEVENTY_B)
SMALL = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=2", "vocab_size=320")
SMALLER = [*(f"model.config.{size}" for size in SMALL), "model.config.num_key_value_heads=2", "data.vocab_size=320",
           "data.sequence_length=32", "model.config.max_position_embeddings=32"]  # fmt: skip
DRIVER = {"h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200", "a100": "NVIDIA A100-SXM4-80GB", "l4": "NVIDIA L4"}


def converted_by_train(config, gpu, monkeypatch):
    monkeypatch.setattr(auto_convert, "local_gpu_name", lambda: DRIVER.get(gpu, gpu))
    with torch.device("meta"):
        task = planned_task(config)
        model = task.build(weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no layer of this model is predicted to gain")
        rows = convert_run(model, task, torch.device("cuda"), 1, None) or ()
    return {row.name: row.recipe for row in rows if row.converted}


CONVERTING = ("level=fp8", "level=bf16", "recipe=auto", "recipe=blockwise", "skip_last=1")
OFTEN = {("h100", "recipe=auto"), ("b200", "recipe=blockwise"), ("a100", "level=fp8")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "overrides", "gpu"),
    [(DEMO, SMALLER, "a100"), (DEMO, [*SMALLER, "precision.level=fp8", "precision.autopilot=true"], "b200")]
    + [slow(OWN_DATA, [*SMALLER, f"precision.{each}"], gpu, unless=(gpu, each) in OFTEN)
       for gpu in ("h100", "b200", "a100") for each in CONVERTING]
    + [slow(path, [], gpu) for path in MEASURED for gpu in DEVICES]
    + [slow(path, [], "h100") for path in SHIPPED if path not in MEASURED],
    ids=lambda value: value.name if isinstance(value, Path) else None if isinstance(value, list) else value,
)  # fmt: skip
def test_every_configuration_is_planned_on_every_gpu_as_train_converts_it(path, overrides, gpu, monkeypatch):
    result = command("plan", path, *overrides, "--gpu", gpu, "--json")
    assert result.exit_code == 0, result.output
    recipes = {row["name"]: row["recipe"]["name"] for row in json.loads(result.stdout)["configured"]["modules"]
             if row["recipe"]}  # fmt: skip
    if gpu in DRIVER:
        assert recipes == converted_by_train(load_config(path, overrides), gpu, monkeypatch)


@pytest.mark.thorough
def test_mixtures_of_experts_are_not_counted_as_linear_layers(make_config):
    model = {"type": "mixtral", "config": LLAMA | {"num_local_experts": 4, "vocab_size": 300}}
    prediction = plan_step(make_config(model=model, precision={"level": "fp8"}), gpu="h100")
    own, layers = prediction.configured, LLAMA["num_hidden_layers"]
    summary = prediction.summary_of(own.plan, own.time)
    assert f"{4 * layers} of {4 * layers + 1} linear layers and {layers} mixtures of experts in rowwise" in summary


def test_a_run_in_bf16_is_shown_in_bf16():
    prediction = plan_step(load_config(DEMO, LARGER), gpu="h200")
    assert prediction.converted and not prediction.configured.plan.converted
    assert prediction.configured.time.seconds == pytest.approx(prediction.bf16.seconds)
    assert prediction.configured.memory.peak == prediction.bf16_memory.peak


def test_what_the_run_refuses_the_plan_refuses():
    with pytest.raises(ValueError, match="no layer would be converted"):
        plan_step(load_config(DEMO, [*SMALLER, "precision.level=fp8", "precision.min_features=9999"]), gpu="h100")


@pytest.mark.thorough
def test_settings_of_the_run_reach_the_step(make_config):
    plain = plan_step(make_config(), gpu="h100")
    full = plan_step(make_config(precision={"checkpointing": "full"}), gpu="h100")
    assert full.bf16.linears > plain.bf16.linears
    fp8 = plan_step(make_config(optim={"states": "fp8"}), gpu="h100")
    assert fp8.planned.optimizer == pytest.approx(plain.planned.optimizer * (2 * (6 + 2 + 10 / 128) + 4) / 32)
    assert fp8.bf16.optimizer == plain.bf16.optimizer
    mixed = plan_step(make_config(precision={"parameters": "fp32"}), gpu="h100")
    assert mixed.bf16.attention == plain.bf16.attention


LAST_APART = {"optim": {"name": "muon", "groups": [{"match": "*layers.5.*", "muon": False}]}}
FEW = [({}, 2), ({"precision": {"level": "fp8+activations"}}, 2), ({"precision": {"checkpointing": "full"}}, 2)]


@pytest.mark.parametrize(("changes", "blocks"), [*FEW, (LAST_APART, 6)], ids=str)
def test_a_few_blocks_stand_for_all_that_no_group_of_parameters_tells_apart(make_config, changes, blocks):
    config = make_config(model={"type": "llama", "config": LLAMA | {"num_hidden_layers": 6}}, **changes)
    few = plan_memory(config)
    with all_blocks():
        whole = plan_memory(config)
    assert (whole.traced_blocks, few.traced_blocks) == ((6, 6), (blocks, 6))
    assert few.at_peak == whole.at_peak and few.largest == whole.largest
    assert few.saved_by_layer == whole.saved_by_layer and few.saved_by_dtype == whole.saved_by_dtype


@pytest.mark.thorough
def test_selective_checkpointing_saves_what_it_holds(make_config):
    """Of each block the outputs of products and attention, and its input, where full checkpointing saves the input."""
    model = {"type": "llama", "config": LLAMA | {"num_hidden_layers": 6}}
    kinds = ("none", "selective", "full")
    none, selective, full = (plan_memory(make_config(model=model, precision={"checkpointing": k})) for k in kinds)
    more = selective.largest[ACTIVATIONS] - full.largest[ACTIVATIONS]
    assert selective.saved - full.saved == pytest.approx(more, rel=0.05)
    assert full.saved < selective.saved < none.saved
    assert len({selective.saved_by_layer[f"model.layers.{i}"] for i in range(6)}) == 1


@pytest.mark.thorough
def test_many_gpus_share_the_model_as_the_configuration_says(make_config):
    batch = {"batch": 8}
    one = plan_step(make_config(optim={"batch": 1}), gpu="h100").memory.at_peak
    eight = plan_step(make_config(optim=batch), gpu="h100", gpus=8)
    assert eight.memory.at_peak["parameters"] < one["parameters"] / 7
    off = plan_step(make_config(optim=batch, parallel={"dp_replicate": 2}), gpu="h100", gpus=8)
    assert off.step_config.copies == 2 and off.step_config.shards == 4
    assert off.memory.at_peak["parameters"] > 1.9 * eight.memory.at_peak["parameters"]


def test_recipe_auto_on_a_gpu_is_decided_by_cost(make_config, monkeypatch):
    monkeypatch.setattr(auto_convert, "local_gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 2}
    config = make_config(
        model={"type": "llama", "config": LLAMA | wide | {"vocab_size": 300}},
        precision={"level": "fp8", "recipe": "auto"}, optim={"batch": 256, "micro_batches": 1},
    )  # fmt: skip
    assert config.precision_label == "fp8 auto"
    tokens = 256 * config.data.sequence_length

    def rows(device):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**LLAMA | wide, vocab_size=300)).bfloat16()
        return {row.name: row for row in convert_run(model, planned_task(config), torch.device(device), 1, None) or ()}

    decide_by_cost = rows("cuda")
    up, narrow = decide_by_cost["model.layers.0.mlp.up_proj"], decide_by_cost["model.layers.0.self_attn.k_proj"]
    assert up.converted and f"{tokens} tokens assumed on H100 SXM" in up.reason
    assert not narrow.converted and "narrow" in narrow.reason
    assert all(row.recipe == "rowwise" for name, row in rows("cpu").items() if name != "lm_head")


ACTIVATIONS_OF = [1000, 700, 700, 500]
HIDDEN = 10


def held_by_stages(schedule, count, micro_batches):
    """What a GPU holds beside a micro-batch of each stage: all the time, and activations in forward and in backward."""
    held = enumerate(ACTIVATIONS_OF[:count], 1)
    alone = [{PARAMETERS: 10**4 * n, ACTIVATIONS: activations, TEMPORARIES: 7} for n, activations in held]
    config = StepConfig(gpus=2, pp=2, schedule=schedule, micro_batches=micro_batches)
    beside = held_beside(config, alone, HIDDEN)
    return [(held, [more[phase][ACTIVATIONS] for phase in ("forward", "backward")]) for _, (held, more) in
            sorted(beside.items())]  # fmt: skip


@pytest.mark.parametrize(("schedule", "others"), [("1F1B", [1, 0]), ("GPipe", [3, 3])])
def test_activations_of_other_micro_batches(schedule, others):
    beside = held_by_stages(schedule, 2, 4)
    for index, count in enumerate(others):
        held, activations = beside[index]
        assert activations == [count * ACTIVATIONS_OF[index]] * 2
        assert held[GATHERED] == 4 * HIDDEN  # buffers of all micro-batches, for one neighbour
    assert beside[0][0][BATCH] == 0 and beside[1][0][BATCH] == -HIDDEN


def test_a_rank_holds_its_other_stages():
    beside = held_by_stages("Interleaved1F1B", 4, 2)
    assert [held[PARAMETERS] for held, _ in beside] == [30000, 40000, 10000, 20000]
    for held, _ in beside:
        assert held[ACTIVATIONS] == held[TEMPORARIES] == 0 and held[GATHERED] == 2 * HIDDEN * 3
    # Rank 0 runs both micro-batches through stage 0 before stage 2.
    assert beside[2][1][0] == 2 * ACTIVATIONS_OF[0] + ACTIVATIONS_OF[2]


def test_activations_auto_fuses_in_eager_blocks_on_a_gpu_only(make_config):
    def resolved(gpu, model="llama", tokens=MIN_FUSED_NUMEL // LLAMA["hidden_size"], **sections):
        config = make_config(precision={"activations": "auto"} | sections.pop("precision", {}), **sections)
        model = planned_task(config).build(weights=False) if model == "llama" else model
        return with_activations(config, model, tokens, gpu=gpu).resolved.activations

    eager = {"run": {"compile": "none"}}
    assert resolved(True, **eager) == resolved(True, parallel={"tp": 2}) == "fused"
    assert resolved(True) == resolved(False, **eager) == resolved(True, model=nn.LayerNorm(8), **eager) == "bf16"
    assert resolved(True, tokens=MIN_FUSED_NUMEL // LLAMA["hidden_size"] - 1, **eager) == "bf16"  # the host is slower
    assert resolved(True, precision={"level": "fp8+activations"}, **eager) == "fp8"


def test_a_run_with_fused_kernels_says_so_and_stays_in_bf16(make_config):
    config = make_config(precision={"activations": "fused"}, eval={"every": 2, "fraction": 0.3})
    trainer = Trainer(config, load(config), torch.device("cpu"))
    summary = trainer.describe()
    assert "fused kernels in 10 modules" in summary.converted and summary.precision == "bf16+fused"
    assert not trainer.in_fp8 and set(trainer.evaluate()) == {LOSS}
    plain = make_trainer(make_config())
    assert summary.saved_bytes_per_token < 0.8 * plain.describe().saved_bytes_per_token
    assert trainer.train_step().loss == pytest.approx(plain.train_step().loss, rel=1e-2)


# --- hybrid layouts: what real ranks hold and send ---


NAMES = {"all-gather": "_allgather_base_", "reduce-scatter": "_reduce_scatter_base_", "all-to-all": "alltoall_base_"}
VOCABULARY = 512
DEEPSEEK = BASE | FAMILIES["deepseek_v3"] | {"num_hidden_layers": 7, "first_k_dense_replace": 3, "vocab_size": 512}
LAYOUTS = {
    "tp": (2, {"tp": 2}), "tp-fsdp": (4, {"tp": 2}), "cp": (2, {"cp": 2}), "ep-fsdp": (4, {"ep": 2}),
    "pp": (2, {"pp": 2}), "pp-interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}),
    "pp-tp": (4, {"pp": 2, "tp": 2}), "pp-fsdp": (4, {"pp": 2}),
}  # fmt: skip


class Recording(step_memory.Timeline):
    """A timeline that sees FSDP2 free gathered weights by resizing them, and does not count them as activations."""

    def __enter__(self):
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            original(storage, size)
            if (number := self._numbers.get(storage)) is not None:
                self._change(number, self._rounded(storage))

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "split_with_sizes_copy" in func._schema.name:
            self.relabel((kwargs or {}).get("out", []), GATHERED)
        return out


def measured(tables):
    with trainer_of_ranks(tables) as trainer:
        trainer.train_step()  # states exist, and torch has inferred the shapes of stages
    states = [t for t in tree_leaves(trainer.optimizer.state_dict()) if isinstance(t, torch.Tensor)]
    held = [{t.untyped_storage()._cdata: t.nbytes for t in map(local_tensor, tensors)} for tensors in
            (trainer.model.parameters(), states)]  # fmt: skip
    inputs, targets = trainer._batch(0)
    timeline, recorder = Recording(512), CollectiveRecorder()
    timeline.label([*trainer.model.parameters(), *trainer.model.buffers(), *states, inputs, targets], PARAMETERS)
    timeline.follow(trainer.model)
    with timeline, recorder:
        trainer.forward_backward(inputs, targets)
    activations = timeline.events().series.largest.get(ACTIVATIONS, 0)
    sent = {(op, back): 0 for op in NAMES for back in (False, True)}
    sent |= {key: size for key, size in timeline.messages.items() if key[0] in NAMES}
    return [sum(sizes.values()) for sizes in held], activations, sent, recorder.bytes("send")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_holds_and_sends(gloo, settings, layout):
    world, parallel = LAYOUTS[layout]
    fields = (MIXTRAL if "ep" in parallel else PIPELINE) | {"vocab_size": VOCABULARY}
    own = settings(fields=fields, parallel=parallel, optim={"micro_batches": 4 if "pp" in parallel else 1})
    real = gloo.run(measured, world, own)
    plan = plan_configured(parse_config(own), gpu="h100", gpus=world).memory
    assert plan.largest[PARAMETERS] == pytest.approx(max(r[0][0] for r in real), rel=0.01)  # rounded to 512 bytes
    assert plan.largest[step_memory.STATES] == pytest.approx(max(r[0][1] for r in real), rel=0.01)
    # Beside saved tensors, small ones of the trainer and of torch's stages are alive when backward begins.
    if "ep" not in parallel:  # whose rows depend on the router
        # FSDP2 has not scattered the head's gradient yet, which the loss made in forward.
        waiting = VOCABULARY * 128 * 2 if layout in ("tp-fsdp", "cp") else 0
        if layout == "pp-fsdp":  # nor all of a stage, whose float32 sums stay whole until its last micro-batch
            waiting = 4 * plan.largest[PARAMETERS]  # of which two shards have two bytes for each element
            assert (
                waiting <= plan.largest[step_memory.GRADIENTS] <= 1.25 * waiting
            )  # and those of a block before they are added
        assert plan.largest[ACTIVATIONS] == pytest.approx(max(r[1] for r in real) - waiting, rel=0.1)
    sent = real[0][2]
    predicted = plan.messages
    if layout == "tp":
        assert {key: size for key, size in sent.items() if size} == predicted[0]
    if layout == "cp":
        assert all(sent["all-to-all", back] == predicted[0]["all-to-all", back] for back in (False, True))
    if layout == "tp-fsdp":  # gradients are scattered in backward
        assert sent["reduce-scatter", False] == predicted[0]["reduce-scatter", False]
    if "pp" in parallel:
        ahead = 3 if layout == "pp-interleaved" else 1  # messages of rank 0 for each micro-batch
        assert real[0][3] == 4 * ahead * plan.stage_message
    if layout == "pp-tp":
        of_rank = [sum(sizes.values()) for sizes in (sent, predicted[0])]
        assert of_rank[0] == 4 * of_rank[1]


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("GPipe", 3 / 8), ("1F1B", 3 / 8), ("Interleaved1F1B", 3 / 16), ("LoopedBFS", 3 / 16), ("ZBVZeroBubble", 1 / 16)],
)
def test_bubbles_of_torchs_schedules(schedule, bubble):
    """(p - 1) / m of the ideal time, divided by the stages of a rank; of ZBV a third of that, as B and W are apart."""
    actions = schedule_actions(schedule, 4, 8)
    stages = 1 + max(action.stage for row in actions for action in row)
    seconds = simulate(actions, [4 / stages] * stages, [8 / stages] * stages)
    assert seconds / (8 * 3) - 1 == pytest.approx(bubble)


def test_the_plan_refuses_what_a_run_refuses(settings):
    with pytest.raises(ConfigError, match="does not divide the 4 processes"):
        plan_configured(parse_config(settings(parallel={"tp": 3})), gpu="h100", gpus=4)
    with pytest.raises(ConfigError, match="ep distributes experts that compute in FP8"):
        bf16 = settings("mixtral", parallel={"ep": 2}, precision={"level": "bf16"})
        plan_configured(parse_config(bf16), gpu="h100", gpus=4)


@pytest.mark.thorough
def test_shapes_that_dtensor_infers_are_no_memory(settings):
    """It infers each once in a process, on whole tensors: a first plan is as a second."""
    config = settings(fields=PIPELINE | {"num_hidden_layers": 6, "vocab_size": VOCABULARY}, parallel={"tp": 2})
    _clear_sharding_prop_cache()
    plans = [plan_configured(parse_config(config), gpu="h100", gpus=2) for _ in range(2)]
    assert {plan.memory.traced_blocks for plan in plans} == {(2, 6)}
    assert len({plan.memory.peak for plan in plans}) == len({plan.time.seconds for plan in plans}) == 1


@pytest.mark.slow
def test_ranks_that_share_layers_compute_as_much_as_one(settings):
    flops = []
    for parallel in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}, {"pp": 2}):
        fields = PIPELINE | {"vocab_size": VOCABULARY}
        config = settings(fields=fields, parallel=parallel, optim={"micro_batches": 2})
        flops.append(plan_configured(parse_config(config), gpu="h100", gpus=2).time.flops)
    whole_heads = flops.pop(2)  # each rank has all tokens for the head
    assert flops == [pytest.approx(flops[0])] * 4 and 1.0 < whole_heads / flops[0] < 1.5


@pytest.mark.slow
def test_equal_stages_are_traced_once(settings, monkeypatch):
    traced, original = [], run_plan._trace_step
    monkeypatch.setattr(run_plan, "_trace_step", lambda *args: traced.append(args[3].index) or original(*args))
    fields = {"num_hidden_layers": 8, "vocab_size": VOCABULARY}
    tables = settings(fields=fields, parallel={"pp": 4}, optim={"batch": 16, "micro_batches": 8})
    plan_configured(parse_config(tables), gpu="h100", gpus=4)
    assert traced == [0, 1, 3]  # with two blocks each, all of which run


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.slow
def test_first_blocks_that_differ_are_traced_once(settings, gpus):
    tables = settings(optim={"batch": 16, "micro_batches": 2})
    tables["model"] = {"type": "deepseek_v3", "config": DEEPSEEK}
    plan = plan_configured(parse_config(tables), gpu="h100", gpus=gpus).memory
    with all_blocks():
        whole = plan_configured(parse_config(tables), gpu="h100", gpus=gpus).memory
    assert (plan.traced_blocks, whole.traced_blocks) == ((5, 7), (7, 7))
    assert (plan.at_peak, plan.largest) == (whole.at_peak, whole.largest)
