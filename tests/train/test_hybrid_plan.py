"""octavo plan of hybrid layouts: what real ranks hold and send."""

import pytest
import torch
from tiny_runs import MIXTRAL, PIPELINE, load
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_leaves

from collective_recorder import CollectiveRecorder
from octavo.planner.step import schedule_actions, simulate
from octavo.planner.step_memory import ACTIVATIONS, GATHERED, GRADIENTS, PARAMETERS, STATES, Timeline
from octavo.tensor import local_tensor
from octavo.train import ConfigError, parse_config, run_plan
from octavo.train.ranks import Ranks
from octavo.train.run_plan import plan_configured
from octavo.train.trainer import Trainer
from whole_plans import all_blocks

pytestmark = pytest.mark.dist
NAMES = {"all-gather": "_allgather_base_", "reduce-scatter": "_reduce_scatter_base_", "all-to-all": "alltoall_base_"}
VOCABULARY = 512
DEEPSEEK = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 3, "max_position_embeddings": 64,
}  # fmt: skip
LAYOUTS = {
    "tp": (2, {"tp": 2}), "tp-fsdp": (4, {"tp": 2}), "cp": (2, {"cp": 2}), "ep-fsdp": (4, {"ep": 2}),
    "pp": (2, {"pp": 2}), "pp-interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}),
    "pp-tp": (4, {"pp": 2, "tp": 2}), "pp-fsdp": (4, {"pp": 2}),
}  # fmt: skip


class Recording(Timeline):
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
    config, device = parse_config(tables), torch.device("cpu")
    rank = torch.distributed.get_rank()
    ranks = Ranks(device, rank, torch.distributed.get_world_size(), rank)
    trainer = Trainer(config, load(config), device, ranks=ranks)
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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_holds_and_sends(gloo, settings, layout):
    world, parallel = LAYOUTS[layout]
    fields = (MIXTRAL if "ep" in parallel else PIPELINE) | {"vocab_size": VOCABULARY}
    own = settings(fields=fields, parallel=parallel, optim={"micro_batches": 4 if "pp" in parallel else 1})
    real = gloo.run(measured, world, own)
    plan = plan_configured(parse_config(own), gpu="h100", gpus=world).memory
    assert plan.largest[PARAMETERS] == pytest.approx(max(r[0][0] for r in real), rel=0.01)  # rounded to 512 bytes
    assert plan.largest[STATES] == pytest.approx(max(r[0][1] for r in real), rel=0.01)
    # Beside saved tensors, small ones of the trainer and of torch's stages are alive when backward begins.
    if "ep" not in parallel:  # whose rows depend on the router
        # FSDP2 has not scattered the head's gradient yet, which the loss made in forward.
        waiting = VOCABULARY * 128 * 2 if layout in ("tp-fsdp", "cp") else 0
        if layout == "pp-fsdp":  # nor all of a stage, whose float32 sums stay whole until its last micro-batch
            waiting = 4 * plan.largest[PARAMETERS]  # of which two shards have two bytes for each element
            assert waiting <= plan.largest[GRADIENTS] <= 1.25 * waiting  # and those of a block before they are added
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
