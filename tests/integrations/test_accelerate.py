"""Loops on accelerate in FP8: the losses of a plain loop, saved states, several ranks, settings that contradict."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="accelerate is not installed")

import octavo
from octavo.integrations.accelerate import Fp8Accelerator
from octavo.integrations.common import Fp8State, check_optimizer, fallback_recipes
from processes import gloo  # noqa: F401
from support.llamas import become_rank_of_two, forget_settings, small_llama
from support.tool_loops import optimizer_of
from support.tool_loops import plain_loop as train

pytestmark = pytest.mark.usefixtures("fresh_settings")


def batches_of(samples, count, size=4):
    return [torch.stack([row["input_ids"] for row in samples[i * size : (i + 1) * size]]) for i in range(count)]


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["fp8", "fp8+activations+optimizer"])
def test_training_and_a_resumed_run_are_those_of_a_plain_loop(level, llama, samples, tmp_path):
    by_hand, data = llama(torch.bfloat16), batches_of(samples, 6)
    octavo.convert(by_hand, precision=octavo.Precision.level(level), verbose=False)
    expected = train(by_hand, optimizer_of(by_hand, level), data)

    accelerator = Fp8Accelerator(cpu=True, precision=level)
    model = llama(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, level))
    losses = train(model, optimizer, data[:3], accelerator.backward)
    accelerator.save_state(str(tmp_path))
    train(model, optimizer, data[:1], accelerator.backward)
    accelerator.load_state(str(tmp_path))
    assert losses + train(model, optimizer, data[3:], accelerator.backward) == expected


def test_saved_fp8_states_are_not_loaded_by_another_optimizer(llama, samples, tmp_path):
    accelerator = Fp8Accelerator(cpu=True, precision="fp8+activations+optimizer")
    model = llama()
    model, optimizer = accelerator.prepare(model, octavo.AdamW(model.parameters()))
    train(model, optimizer, batches_of(samples, 1), accelerator.backward)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator.precision = octavo.Precision.level("fp8+activations")
    model = llama()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.warns(UserWarning, match="precision.states = 'fp8', now"):
        with pytest.raises(ValueError, match=r"states, which torch\.optim\.adamw\.AdamW does not read: go on"):
            accelerator.load_state(str(tmp_path))


@pytest.mark.thorough
def test_recipes_with_state_are_in_saved_states(llama, samples, tmp_path):
    accelerator = Fp8Accelerator(cpu=True, precision={"recipe": "rowwise_equalized"})
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    train(model, optimizer, batches_of(samples, 3), accelerator.backward)
    accelerator.save_state(str(tmp_path))
    saved = octavo.nn.equalized.state_dict(model)
    train(model, optimizer, batches_of(samples, 1), accelerator.backward)
    assert octavo.nn.equalized.state_dict(model) != saved
    accelerator.load_state(str(tmp_path))
    assert octavo.nn.equalized.state_dict(model) == saved


def test_settings_that_contradict_each_other(llama):
    cases = [
        ({"mixed_precision": "fp8"}, "accelerate's own FP8"),
        ({"mixed_precision": "fp16"}, "'fp16'"),
        ({"precision": "O9"}, "unknown precision level 'O9'"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, ImportError), match=message):
            Fp8Accelerator(cpu=True, **options)
        forget_settings()
    accelerator, model = Fp8Accelerator(cpu=True, precision="fp8+activations+optimizer"), llama()
    with pytest.raises(ValueError, match=r"the optimizer is a torch\.optim\.sgd\.SGD: create it with octavo\.AdamW"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert not any(row.converted for row in octavo.report(model))


def test_what_is_converted_and_what_is_not(llama):
    accelerator = Fp8Accelerator(cpu=True)
    model, _ = accelerator.prepare(llama(), torch.nn.CrossEntropyLoss())
    alone = accelerator.prepare_model(llama())
    evaluated = accelerator.prepare_model(llama(), evaluation_mode=True)
    assert [sum(row.converted for row in octavo.report(m)) for m in (model, alone)] == [14, 14]
    assert not any(row.converted for row in octavo.report(evaluated))
    accelerator.prepare(model)
    assert len(accelerator._custom_objects) == 2


@pytest.mark.thorough
def test_memory_is_free_of_models(llama, tmp_path):
    accelerator = Fp8Accelerator(cpu=True)
    first = weakref.ref(accelerator.prepare(llama()))
    accelerator.free_memory()
    assert first() is None
    accelerator.prepare(llama())
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator.prepare(llama())
    accelerator.load_state(str(tmp_path))


def _two_rank_losses(recipe):
    become_rank_of_two()
    model = small_llama()
    try:
        accelerator = Fp8Accelerator(cpu=True, precision={"recipe": recipe})
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    except ValueError as error:
        return str(error)
    data = [batch.chunk(2)[dist.get_rank()] for batch in tokens()]
    return train(model, optimizer, data, accelerator.backward)


def tokens():
    return torch.randint(0, 64, (4, 8, 16), generator=torch.Generator().manual_seed(3))


@pytest.mark.thorough
def test_two_ranks_train_like_one(gloo):  # noqa: F811
    model = octavo.convert(small_llama(), verbose=False)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens())
    first, second = gloo.run(_two_rank_losses, 2, "rowwise")
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(expected, rel=2e-3)


@pytest.mark.thorough
def test_state_of_one_rank_is_refused_on_two(gloo):  # noqa: F811
    messages = gloo.run(_two_rank_losses, 2, "rowwise_equalized")
    assert all("recipe 'rowwise_equalized'" in message and "octavo.parallelize" in message for message in messages)


def _fallbacks():
    names = fallback_recipes()
    model = octavo.convert(small_llama(), verbose=False)
    state = Fp8State(octavo.convert(small_llama(), "rowwise_equalized", verbose=False), octavo.Precision()).state_dict()
    with pytest.raises(ValueError, match="recipe 'rowwise_equalized'.*which ranks have to share"):
        Fp8State(model, octavo.Precision()).load_state_dict(state)
    return names


@pytest.mark.thorough
def test_layers_move_to_no_state_of_one_rank_on_two(gloo):  # noqa: F811
    for names in gloo.run(_fallbacks, 2):
        assert names == ("tensorwise", "rowwise", "blockwise", "mxfp8", "rowwise_hp_wgrad")
    assert "rowwise_equalized" in fallback_recipes()


def test_optimizers_with_other_states_are_left_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    optimizer.state["step"] = 3
    for each in (optimizer, object(), None):
        check_optimizer(octavo.Precision.level("fp8"), each)
    foreign = SimpleNamespace(state={0: {"exp_avg_fp8": torch.ones(2)}})  # of no class that derives from torch's
    with pytest.raises(ValueError, match="SimpleNamespace does not read"):
        check_optimizer(octavo.Precision.level("fp8"), foreign)
