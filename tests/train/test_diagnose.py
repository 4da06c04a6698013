import pytest
import torch
from torch import nn
from torch.nn import functional as F

from octavo.train.compiled_blocks import Checkpointing
from octavo.train.diagnose import find_origin, non_finite_parameter


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.poison = nn.Identity()
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.relu(self.up(self.poison(x)))
        return x + self.down(hidden), {"hidden": hidden}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class Poisoned(torch.autograd.Function):
    """Identity forward; backward gives `gradient` back, whatever it was given."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.gradient), None


class Poison(nn.Module):
    def __init__(self, gradient=torch.nan):
        super().__init__()
        self.gradient = gradient

    def forward(self, x):
        return Poisoned.apply(x, self.gradient)


def origin(model, x=None):
    x = torch.ones(5, 4) if x is None else x
    return find_origin(model, lambda: model(x).sum().backward()).text


def make_model():
    torch.manual_seed(0)
    return Model()


def test_nothing_where_all_is_finite():
    model = make_model()
    assert origin(model) is None
    assert non_finite_parameter(model) is None


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_the_first_output_is_named(value):
    model = make_model()
    for later in (1, 2):
        model.blocks[later].down.register_forward_hook(lambda *_: torch.full((5, 4), value, requires_grad=True))
    assert origin(model) == "output of blocks.1.down"


def test_a_fault_between_modules_is_the_parents():
    model = make_model()
    relu = model.blocks[1].forward
    model.blocks[1].forward = lambda x: (relu(x)[0] * torch.inf, {})
    assert origin(model) == "output of blocks.1"


def test_the_module_whose_backward_fails_is_named():
    for place, expected in (
        (lambda model: model.blocks[1], "gradient of the input of blocks.1.poison"),
        (lambda model: model.blocks[0], "gradient of the input of blocks.0.poison"),
    ):
        model = make_model()
        place(model).poison = Poison()
        model.blocks[2].poison = Poison(gradient=1.0)
        assert origin(model, torch.ones(5, 4, requires_grad=True)) == expected


def test_a_gradient_that_fails_between_modules_is_that_of_the_output_before():
    model = make_model()
    origin = find_origin(model, lambda: Poisoned.apply(model(torch.ones(5, 4)), torch.nan).sum().backward())
    assert origin.text == "gradient of the output of head"


def test_the_same_with_recomputation():
    model = make_model()
    model.blocks[1].poison = Poison()
    Checkpointing(model, "full")
    assert origin(model) == "gradient of the input of blocks.1.poison"


def test_a_weight_gradient_that_overflows_is_named():
    model = make_model()
    x = torch.full((5, 4), 1e30)
    big = find_origin(model, lambda: (model(x) * 1e30).sum().backward())
    assert big.text == "gradient of head.weight"


def test_hooks_are_gone_afterwards_even_after_an_error():
    model = make_model()
    with pytest.raises(ZeroDivisionError):
        find_origin(model, lambda: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_parameter_is_named():
    model = make_model()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # buffers may hold infinities by design
    assert non_finite_parameter(model) is None
    with torch.no_grad():
        model.blocks[2].up.bias[1] = torch.inf
    assert non_finite_parameter(model) == "blocks.2.up.bias"
