"""States of `torch.optim.AdamW` are converted; every other state is refused, and then nothing has changed."""

import copy

import pytest
import torch
from test_adamw import parameters, train
from torch import nn

from octavo.kernels.adamw.reference import expand
from octavo.numerics import sqnr
from octavo.optim import AdamW
from support.refusals import refused
from tensors import same

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2}


def torch_saved(params, steps=4, kind=torch.optim.AdamW, **settings):
    optimizer = kind(params, **{**SETTINGS, **settings})
    train(optimizer, params, steps)
    return optimizer, optimizer.state_dict()


def test_a_run_continues_from_torch_adamw():
    """Float32 states: the same steps as torch's; FP8 states: the moments are those of torch, rounded once."""
    params = parameters()
    theirs, saved = torch_saved(params)
    for states in ("fp32", "fp8"):
        mine = [nn.Parameter(p.detach().clone()) for p in params]
        ours = AdamW(mine, lr=5.0, states=states)
        ours.load_state_dict(copy.deepcopy(saved))
        group = ours.param_groups[0]
        assert {name: group[name] for name in SETTINGS} == SETTINGS and group["states"] == states
        assert not {"amsgrad", "foreach", "fused", "decoupled_weight_decay"} & set(group)
        for i, param in enumerate(mine):
            state = ours.state[param]
            assert state["step"] == 4
            if "exp_avg_hi" not in state:
                assert torch.equal(state["exp_avg"], saved["state"][i]["exp_avg"])
                assert torch.equal(state["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])
            elif param.numel():
                for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    codes = state[f"{name}_fp8"].view(param.shape[0], -1)
                    moments = expand(codes, state[f"{name}_hi"], state[f"{name}_k"], signed)
                    assert sqnr(saved["state"][i][name].view_as(moments), moments) > 25
        train(ours, mine, 3, start=4)
        if states == "fp32":
            twins = [nn.Parameter(p.detach().clone()) for p in params]
            other = torch.optim.AdamW(twins, **SETTINGS, foreach=False)
            other.load_state_dict(copy.deepcopy(saved))
            train(other, twins, 3, start=4)
            for a, b in zip(mine, twins, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
        resumed = AdamW(mine, states=states)
        resumed.load_state_dict(ours.state_dict())
    assert theirs.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize("choice", ["foreach", "fused", "neither"])
def test_torch_adamw_takes_no_fp8_codes_for_moments(choice):
    params = parameters()
    ours = AdamW(params, states="fp8")
    train(ours, params, 2)
    before = [param.detach().clone() for param in params]
    theirs = torch.optim.AdamW(params, foreach=choice == "foreach", fused=choice == "fused")
    theirs.load_state_dict(ours.state_dict())
    refused("exp_avg", train, theirs, params, 1, kind=KeyError)
    assert same(before, params)


@pytest.mark.parametrize("master", ["remainder", "fp32", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_begin_at_their_present_values(dtype, master):
    if dtype == torch.float16 and master == "remainder":
        return
    params = parameters(dtype)
    _, saved = torch_saved(params)
    start = [p.detach().clone() for p in params]
    ours = AdamW(params, master=master, states="fp32")
    ours.load_state_dict(saved)
    for param, before, i in zip(params, start, range(len(params)), strict=True):
        state = ours.state[param]
        assert state["exp_avg"].dtype == torch.float32 and torch.equal(param, before)
        assert torch.equal(state["exp_avg"], saved["state"][i]["exp_avg"].float())
        if master == "fp32":
            assert torch.equal(state["master"], before.float())
        elif master == "remainder":
            assert not state["remainder"].any()
    train(ours, params, 1, start=4)
    assert not torch.equal(params[0], start[0])


def test_step_counts_of_older_versions_groups_and_parameters_without_state():
    params = parameters()
    theirs = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}], **SETTINGS)
    train(theirs, params[:3], 2)
    saved = theirs.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    saved["param_groups"][0]["initial_lr"] = 3e-3
    ours = AdamW([{"params": params[:2]}, {"params": params[2:], "states": "fp32"}])
    ours.load_state_dict(saved)
    assert [group["lr"] for group in ours.param_groups] == [1e-2, 1e-3] and ours.param_groups[0]["initial_lr"] == 3e-3
    assert [group["states"] for group in ours.param_groups] == ["fp8", "fp32"]
    assert ours.state[params[1]]["step"] == 2 and params[3] not in ours.state
    train(ours, params, 1, start=2)
    assert ours.state[params[3]]["step"] == 1


def torch_with(change):
    def make(params):
        _, saved = torch_saved(params)
        saved = copy.deepcopy(saved)
        return change(saved) or saved

    return make


def ours_with(change, dtype=torch.float32):
    def make(params):
        params = parameters(dtype)
        optimizer = AdamW(params)
        train(optimizer, params, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        return change(saved) or saved

    return make


def of(kind, **settings):
    return lambda params: torch_saved(params, kind=kind, **settings)[1]


def sgd(params):
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    train(optimizer, params, 1)
    return optimizer.state_dict()


def state(index, **changes):
    return lambda saved: saved["state"][index].update(changes)


def group(**changes):
    return lambda saved: saved["param_groups"][0].update(changes)


def without(*path):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


REFUSED = {
    "amsgrad": (of(torch.optim.AdamW, amsgrad=True), "AdamW with amsgrad=True.*continue with the optimizer"),
    "max_exp_avg_sq": (torch_with(state(0, max_exp_avg_sq=torch.zeros(40, 200))), "exactly .*; got .*max_exp_avg_sq"),
    "Adam": (of(torch.optim.Adam), r"Adam \(decoupled_weight_decay=False\)"),
    "RAdam": (of(torch.optim.RAdam, decoupled_weight_decay=True), "neither octavo.AdamW nor .* has no amsgrad"),
    "NAdam": (of(torch.optim.NAdam, decoupled_weight_decay=True), "neither octavo.AdamW nor .* has no amsgrad"),
    "SGD": (sgd, "neither octavo.AdamW nor torch.optim.AdamW: it has no betas, eps"),
    "old torch": (torch_with(without("param_groups", 0, "decoupled_weight_decay")), "add decoupled_weight_decay=True"),
    "no exp_avg_sq": (torch_with(without("state", 0, "exp_avg_sq")), "exactly .*exp_avg_sq; got step, exp_avg"),
    "odd key": (torch_with(state(1, extra=1)), "exactly .*exp_avg_sq; got step, exp_avg, exp_avg_sq, extra"),
    "shape": (torch_with(state(0, exp_avg=torch.zeros(200, 40))), "exp_avg must be a tensor of that shape"),
    "nan": (torch_with(state(1, exp_avg=torch.full((7, 128), torch.nan))), "exp_avg must be finite"),
    "inf": (torch_with(state(1, exp_avg_sq=torch.full((7, 128), torch.inf))), "exp_avg_sq must be finite"),
    "lr": (torch_with(group(lr=-1.0)), "lr must be a number, at least 0"),
    "lr text": (torch_with(group(lr="fast")), "lr must be a number, .*; got 'fast'"),
    "betas": (torch_with(group(betas=(0.9,))), "betas must be two numbers"),
    "more keys": (torch_with(group(params=[*range(8)])), r"has groups \[\[0, 1, 2, 3, 4, 5, 6, 7\]\]"),
    "no state": (torch_with(without("state")), "needs `state`, by parameter, and `param_groups`"),
    "no groups": (torch_with(without("param_groups")), "needs `state`, by parameter, and `param_groups`"),
    "no params": (torch_with(without("param_groups", 0, "params")), "needs `state`, by parameter, and `param_groups`"),
    "None": (lambda params: None, "needs `state`, by parameter, and `param_groups`"),
    "a model": (lambda params: nn.Linear(4, 4).state_dict(), "needs `state`, by parameter, and `param_groups`"),
    "a checkpoint": (lambda params: {"optimizer": torch_saved(params)[1]}, "needs `state`, by parameter"),
    "ours, a setting less": (ours_with(without("param_groups", 0, "maximize")), "it has no maximize"),
    "ours, other states": (ours_with(group(states="fp32")), "parameter 0 .* does not fit: .* of other settings"),
    "ours, other master": (ours_with(group(master="fp32"), torch.bfloat16), "does not fit: .* of other settings"),
    "ours, other order": (ours_with(group(params=[1, 0, 2, 3, 4, 5, 6])), r"parameter 1 \[40, 200\] does not fit"),
    "ours, other model": (ours_with(group(params=[0])), r"groups of \[7\] parameters; .*the state of another model"),
    "ours, states": (ours_with(group(states="fp9")), "states is 'fp8' or 'fp32'; got 'fp9'"),
    "ours, a state less": (ours_with(without("state", 0, "exp_avg_k")), "exp_avg_k is none, expected torch.uint8"),
    "ours, a state more": (ours_with(state(0, odd=torch.ones(()))), "odd is torch.float32 .*expected none"),
    "ours, no tensor": (ours_with(state(0, step=3)), r"step is a int, expected torch.float32 \[\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_states_are_refused_and_nothing_changes(case):
    make, message = REFUSED[case]
    saved = make(parameters())
    params = parameters()
    optimizer = AdamW(params, lr=3e-3)
    train(optimizer, params, 2)
    before, groups = copy.deepcopy(optimizer.state_dict()["state"]), copy.deepcopy(optimizer.param_groups)
    refused(message, optimizer.load_state_dict, saved)
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    after = optimizer.state_dict()["state"]
    assert after.keys() == before.keys()
    for index, state_ in before.items():
        assert same(state_, after[index])
    train(optimizer, params, 1, start=2)


def test_groups_of_other_sizes_are_refused():
    params = parameters()
    _, saved = torch_saved(params)
    optimizer = AdamW([{"params": params[:1]}, {"params": params[1:]}])
    refused(r"has groups of \[1, 6\] parameters", optimizer.load_state_dict, saved)


@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_that_loaded_a_state_loads_another(copied):
    """torch adds an entry to the defaults of an optimizer that loads a state or is unpickled; accelerate loads one."""
    weight = torch.nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = copy.deepcopy(optimizer) if copied else optimizer
    for _ in range(2):
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    state["param_groups"][0].pop("betas")
    refused("it has no betas", optimizer.load_state_dict, state)
