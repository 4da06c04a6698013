"""The scaling benchmark: its document is that of its results, its bytes are those of hand formulas, its peaks those of
PyTorch's own tracker, and its times those of a few examples.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmarks import browser, scaling, scaling_hybrid
from benchmarks.scaling_document import document
from benchmarks.scaling_time import FLAT, STAGED, Rates, computing, seconds, sent, step
from benchmarks.scaling_trace import (
    ARMS,
    BASELINE,
    GATHERED,
    MESSAGES,
    WHOLE,
    build,
    facts,
    fake_world,
    make_optimizer,
    sharded,
    summed,
    trace,
)
from benchmarks.scaling_trace import Call as TracedCall
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from octavo.planner.fake import fake_tensors
from octavo.planner.model_memory import make_states
from octavo.planner.timeline import GRADIENTS, PARAMETERS, STATES

COMMITTED = Path(scaling.RESULTS / "simulated" / scaling.FILE)
GATHER, ALL = "fp8, FP8 gather", "fp8+activations+optimizer, all FP8"
LAYERS, WIDTH, INNER, WORDS, KEYS = 3, 512, 1024, 1000, 256
TINY = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": WORDS, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = [
    (WIDTH, WIDTH),
    (KEYS, WIDTH),
    (KEYS, WIDTH),
    (WIDTH, WIDTH),
    (INNER, WIDTH),
    (INNER, WIDTH),
    (WIDTH, INNER),
]
CONVERTED = sum(rows * columns for rows, columns in MATRICES)
BLOCK = CONVERTED + 2 * WIDTH
REST = 2 * WORDS * WIDTH + WIDTH
TOTAL = LAYERS * BLOCK + REST
WORLD = 8


@pytest.fixture(scope="module")
def tiny():
    """Traces of the small model, each made once."""
    models, made = {}, {}

    def get(name, world=WORLD, replicas=1, recompute=False, allocation_granularity=1):
        key = name, world, replicas, recompute, allocation_granularity
        if key not in made:
            if name not in models:
                models[name] = build("llama", TINY, ARMS[name])
            with fake_world(world):
                model = sharded(models[name], ARMS[name], replicas=replicas, recompute=recompute)
                made[key] = trace(model, ARMS[name], tokens=128, allocation_granularity=allocation_granularity)
        return made[key]

    return get


def operand_bytes(row, op):
    return [sum(call["bytes"] for call in row["wire"] if (call["op"], call["backward"]) == (op, late)) for late in
            (False, True)]  # fmt: skip


# What is simulated


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_in_bf16_are_those_of_a_hand_formula(tiny, recompute):
    row = tiny(BASELINE, recompute=recompute)
    assert operand_bytes(row, "all-gather") == [2 * TOTAL / WORLD, 2 * LAYERS * BLOCK / WORLD]
    assert operand_bytes(row, "reduce-scatter") == [0, 2 * TOTAL]
    assert {(call["ranks"], call["apart"]) for call in row["wire"]} == {(WORLD, 1)}


@pytest.mark.thorough
def test_bytes_in_fp8_are_those_of_a_hand_formula(tiny):
    row = tiny(ALL)
    rows = sum(height for height, _ in MATRICES)
    block = CONVERTED + 4 * rows + 2 * 2 * WIDTH  # FP8 and a scale for each row; norms in bf16
    assert operand_bytes(row, "all-gather") == [(LAYERS * block + 2 * REST) / WORLD, LAYERS * block / WORLD]

    def message(elements):
        """Eight pieces of a group's gradients, and a scale for every 128 of each, both in multiples of 16 bytes."""
        piece = elements // WORLD
        return WORLD * sum(-(-size // 16) * 16 for size in (piece, 4 * -(-piece // 128)))

    assert operand_bytes(row, "all-to-all") == [0, LAYERS * message(BLOCK) + message(REST)]
    assert operand_bytes(row, "reduce-scatter") == [0, 0]


@pytest.mark.thorough
def test_ratios_of_the_wire(tiny):
    bf16, gather, everything = (tiny(name) for name in (BASELINE, GATHER, ALL))
    before, after = (sum(operand_bytes(row, "all-gather")) for row in (bf16, gather))
    weights = 2 * 2 * LAYERS * CONVERTED / WORLD  # gathered twice
    assert 0.5 <= (after - (before - weights)) / weights <= 0.52
    assert operand_bytes(everything, "all-gather") == operand_bytes(gather, "all-gather")
    assert operand_bytes(gather, "reduce-scatter") == operand_bytes(bf16, "reduce-scatter")
    assert 0.5 <= operand_bytes(everything, "all-to-all")[1] / operand_bytes(bf16, "reduce-scatter")[1] <= 0.55


def test_copies_add_up_their_shards_gradients(tiny):
    row = tiny(ALL, world=16, replicas=2)
    one = tiny(ALL)
    between = [call for call in row["wire"] if call["op"] == "all-reduce"]
    assert [(call["ranks"], call["apart"], call["bytes"]) for call in between] == [(2, 8, 2 * TOTAL // WORLD)]
    assert [call for call in row["wire"] if call["op"] != "all-reduce"] == one["wire"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64])
def test_what_is_sharded_is_a_part_of_the_whole(tiny, world):
    tensors = LAYERS * 9 + 3
    for name, shard, states in ((BASELINE, 4, 8), (ALL, 2, None)):
        held = tiny(name, world=world)["held"]
        padding = 0 if world == 8 else 2 * shard * WIDTH  # 1000 words on 64 ranks: rank 0 has 16 rows
        assert 0 <= held[PARAMETERS] - shard * TOTAL / world <= padding
        if states is not None:
            assert 0 <= held[STATES] - states * TOTAL / world <= 2 * padding + 4 * tensors
        else:  # two bytes of moments, two of the master, five of scales for every 128 of each moment
            assert 4 * TOTAL / world <= held[STATES] <= 4.2 * TOTAL / world + 2 * padding + 4 * tensors + 8 * 7 * WIDTH


@pytest.mark.thorough
def test_categories_at_the_peak(tiny):
    bf16, gather = tiny(BASELINE, recompute=True), tiny(GATHER, recompute=True)
    for row in (bf16, gather):
        assert row["peak"] == sum(row["at_peak"].values())
    # While the first block's weights are there: one block less in FP8.
    saved = bf16["at_peak"][GATHERED] - gather["at_peak"][GATHERED]
    assert 0.95 <= saved / CONVERTED <= 1.0
    assert all(bf16["at_peak"][kind] for kind in (PARAMETERS, STATES, GRADIENTS, WHOLE, MESSAGES))
    assert tiny(ALL)["peak"] < tiny(GATHER)["peak"] < tiny("fp8")["peak"] < tiny(BASELINE)["peak"]


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.slow
def test_the_peak_is_that_of_pytorchs_tracker(tiny, name, recompute):
    arm = ARMS[name]
    with fake_world(WORLD):
        model = sharded(build("llama", TINY, arm), arm, recompute=recompute)
        with fake_tensors():
            model.to_empty(device="cpu")
            ids = torch.zeros(1, 128, dtype=torch.int64)
            optimizer = make_optimizer(model, arm)
            states = make_states(optimizer)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((ids,))
            tracker.track_external(*states)
            with tracker:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                if not arm.compact:
                    optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert tiny(name, recompute=recompute)["peak"] == peak


def test_edges_are_the_first_gathers_and_the_last_scatters():
    calls = [TracedCall("all-gather", size, 8, 1, False) for size in (100, 20, 3)]
    calls += [TracedCall("all-gather", 20, 8, 1, True)] + [
        TracedCall("reduce-scatter", size, 8, 1, True) for size in (4, 5, 6)
    ]
    forward, again, scatter = summed(calls)
    assert (forward["calls"], forward["bytes"], forward["edge_calls"], forward["edge_bytes"]) == (3, 123, 2, 120)
    assert (again["edge_calls"], again["edge_bytes"]) == (0, 0)
    assert (scatter["bytes"], scatter["edge_bytes"]) == (15, 11)


# What is modelled

RATES = Rates(inside=100e9, between=(80e9,), efficiency=1.0, hop_inside=0.0, hop_between=0.0)
"""100 GB/s inside a machine, 10 GB/s between."""


def call(op, size, ranks, apart=1):
    """A call whose whole is so many bytes."""
    part_size = size // ranks if op == "all-gather" else size
    return {"op": op, "ranks": ranks, "apart": apart, "backward": True, "calls": 1, "bytes": part_size, "edge_calls": 0,
            "edge_bytes": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "ranks", "apart", "staging", "expected_seconds"),
    [
        ("all-gather", 8, 1, FLAT, 7 / 8 / 100),
        ("reduce-scatter", 8, 1, FLAT, 7 / 8 / 100),
        ("all-to-all", 8, 1, FLAT, 7 / 8 / 100),
        ("all-to-all", 8, 1, STAGED, 7 / 8 / 100),
        ("all-gather", 64, 1, FLAT, 7 / 8 / (8 * 10)),  # by eight links at once
        ("reduce-scatter", 64, 1, FLAT, 7 / 8 / (8 * 10)),
        ("all-to-all", 64, 1, FLAT, 56 / 64 / 10),  # each by its own, nothing added up
        ("all-to-all", 64, 1, STAGED, 7 / 8 / 100 + 7 / 8 / (8 * 10)),
        ("all-reduce", 8, 8, FLAT, 2 * 7 / 8 / 10),  # one of eight groups side by side
    ],
)
def test_seconds_of_a_gigabyte(op, ranks, apart, staging, expected_seconds):
    assert seconds(call(op, 64 * 10**9, ranks, apart), RATES, 80e9, staging) == pytest.approx(64 * expected_seconds)


def test_hops_add_to_every_call():
    slow = Rates(**{**asdict(RATES), "hop_inside": 1e-3, "hop_between": 1e-2})
    many = call("all-gather", 0, 64) | {"calls": 3}
    assert seconds(many, slow, 80e9) == pytest.approx(3 * (7 * 1e-3 + 7 * 1e-2))


def test_bytes_sent():
    assert sent(call("all-gather", 800, 8)) == sent(call("reduce-scatter", 800, 8)) == 700
    assert sent(call("all-to-all", 800, 8)) == 700 and sent(call("all-reduce", 800, 8)) == 1400


def test_computing():
    about = {"tokens": 10, "converted": 100, "head": 50, "attention": 4}
    rates = Rates(bf16=1.0, fp8=2.0)
    blocks, attention, head = 2 * 10 * 100, 2 * 100 * 4, 2 * 10 * 50
    once = blocks + attention + head
    assert computing(about, rates, fp8=False, recompute=False) == (once, 2 * once)
    faster = once - blocks / 2
    assert computing(about, rates, fp8=True, recompute=True) == (faster, 2 * faster + blocks / 2 + attention)


def test_a_step_hides_what_it_can():
    about = {"tokens": 10, "converted": 100, "head": 0, "attention": 0}
    wire = [call("all-gather", 800, 8) | {"backward": False}, call("reduce-scatter", 1600, 8) | {"edge_bytes": 400}]
    wire[1]["edge_calls"] = 1
    row = {"arm": BASELINE, "recompute": False, "wire": wire}
    rates = Rates(bf16=2000 / 8.0, inside=100.0, between=(1.0,), efficiency=1.0, hop_inside=0.0, hop_between=0.0)
    seconds = step(row, about, rates, 1.0)  # computing 8 s and 16 s; 7 s of gathers and 14 of scatters, 3.5 at the end
    assert (seconds.compute, seconds.communication) == (24.0, 21.0)
    assert seconds.exposed == pytest.approx(3.5) and seconds.total == pytest.approx(27.5)
    assert seconds.tokens == pytest.approx(10 * max(7 / 8, 10.5 / 16))
    fast = step(row, about, Rates(**{**asdict(rates), "bf16": 2000.0}), 1.0)  # 1 s and 2 s
    assert fast.exposed == pytest.approx(6.0 + 3.5 + 8.5)


# Results and document


def test_the_document_is_that_of_the_results():
    again = "run `python -m benchmarks scaling --document`"
    results = [json.loads(path.read_text()) for path in (COMMITTED, COMMITTED.parent / scaling_hybrid.FILE)]
    assert scaling.DOCUMENT.read_text() == document(*results), again


def test_models_are_of_their_size():
    content = json.loads(COMMITTED.read_text())
    sizes = {name: model["facts"]["parameters"] / 1e9 for name, model in content["models"].items()}
    assert {name: round(size, 1) for name, size in sizes.items()} == {
        "Llama-3-8B": 8.0, "Command-R 35B": 35.0, "Llama-3-70B": 70.6, "Llama-3.1-405B": 405.9,
    }  # fmt: skip
    for name, model in scaling.MODELS.items():
        assert content["models"][name] == model | {"facts": content["models"][name]["facts"]}
        places = {(row["world"], row["replicas"], row["recompute"]) for row in content["rows"] if row["model"] == name}
        assert places == set(scaling.placements(scaling.WORLDS))


def test_the_results_kept_hold_the_promises():
    content = json.loads(COMMITTED.read_text())
    rows = {(r["model"], r["world"], r["replicas"], r["recompute"], r["arm"]): r for r in content["rows"]}
    for (*place, arm), row in rows.items():
        about = content["models"][row["model"]]["facts"]
        ranks = row["world"] // row["replicas"]
        bf16 = rows[*place, BASELINE]
        if arm == ALL:
            weights = 2 * 2 * about["converted"] / ranks
            before, after = (sum(operand_bytes(r, "all-gather")) for r in (bf16, row))
            assert 0.5 <= (after - (before - weights)) / weights <= 0.52, place
            assert 0.5 <= operand_bytes(row, "all-to-all")[1] / operand_bytes(bf16, "reduce-scatter")[1] <= 0.55, place
            assert row["peak"] is None or row["peak"] < bf16["peak"], place
        shard = (2 if ARMS[arm].compact else 4) * about["parameters"] / ranks
        assert 1.0 <= row["held"][PARAMETERS] / shard <= 1.01, place


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--worlds", "12", "--out", "elsewhere"], r"--worlds are whole machines of 8 ranks; got \[12\]"),
        (["--models", "Llama-3-8B"], "the document needs all models and worlds; for some of them give --out"),
        (["--document", "--fp8", "0"], "--fp8 is above 0; got 0"),
        (["--between", "400", "-1"], r"--between is above 0"),
    ],
)
def test_mistakes_are_named_before_anything_is_traced_or_written(words, message, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "write_json", None)
    monkeypatch.setattr(scaling, "traced", None)
    with pytest.raises(SystemExit) as stopped:
        scaling.main(words)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_writes_rows_and_other_rates_another_document(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        scaling, "MODELS", {"Llama-3-70B": {"kind": "llama", "config": TINY | {"num_hidden_layers": 1}}}
    )
    monkeypatch.setattr(scaling, "TOKENS", 128)
    monkeypatch.setattr(scaling, "DOCUMENT", tmp_path / "scaling.md")
    scaling.main(["--models", "Llama-3-70B", "--worlds", "8", "16", "--out", str(tmp_path)])
    path = tmp_path / scaling.FILE
    content = json.loads(path.read_text())
    assert len(content["rows"]) == 5 * len(ARMS) and "GiB" in capsys.readouterr().out
    scaling.publish(path)
    first = (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "images" / "scaling.svg").exists() == (browser.find() is not None)
    assert "| Llama-3-70B | 2 × 8 |" in first
    scaling.main(["--document", "--out", str(tmp_path), "--fp8", "900"])
    scaling.publish(path)
    assert "900 in FP8" in (tmp_path / "scaling.md").read_text() and "600 in FP8" in first


@pytest.mark.slow
def test_llama_3_8b_on_eight_ranks_is_as_kept():
    content = json.loads(COMMITTED.read_text())
    model = scaling.MODELS["Llama-3-8B"]
    kept = [row for row in content["rows"] if (row["model"], row["world"]) == ("Llama-3-8B", 8)]
    assert json.loads(json.dumps(list(scaling.traced("Llama-3-8B", [8], list(ARMS))))) == kept
    about = facts(build(model["kind"], model["config"], ARMS["fp8"]), scaling.TOKENS)
    assert about == content["models"]["Llama-3-8B"]["facts"]
