"""Experts under FSDP2: their 3-D weights are gathered in FP8 or as they are, bit for bit with the same results."""

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo.nn import change_recipe
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from support.moe_models import loss_of, mixture

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
NAME = "model.layers.1.mlp.experts"


def sharded_job(family, comm):
    model = octavo.convert(mixture(family), verbose=False)
    parallelize(model, Parallel(fp8_comm=comm))
    gathered = [name for name in parameters_in_fp8(model) if "experts" in name]
    weights = [name for name, p in model.named_parameters() if "experts" in name and p.ndim == 3]
    assert gathered == (weights if comm == "gather" else [])
    loss = loss_of(model, dist.get_rank())
    result = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert next(row for row in octavo.report(model) if row.name == NAME).recipe == "rowwise"
    with pytest.raises(ValueError, match="sharded already: convert before sharding"):
        change_recipe(model, NAME, None, reason="off")
        change_recipe(model, NAME, "rowwise", reason="on")
    return loss, result


@pytest.mark.slow
@pytest.mark.parametrize(("family", "comm"), [("gpt_oss", "gather"), ("mixtral", "gather"), ("mixtral", "off")])
def test_sharded_experts_give_the_gradients_of_one_process(gloo, family, comm):
    ranks = gloo.run(sharded_job, 2, family, comm)
    model = octavo.convert(mixture(family), verbose=False)
    losses = [loss_of(model, rank) for rank in range(2)]
    assert losses == [loss for loss, _ in ranks]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad / 2, ranks[0][1][name]), name
