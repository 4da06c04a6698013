"""A parameter of any memory layout takes the steps of its contiguous copy, bit for bit."""

from itertools import product

import pytest
import torch
from torch import nn

from octavo.kernels.adamw import ADAMW
from octavo.optim import AdamW
from tensors import ADAMW_BACKENDS, randn, same, saved_and_loaded

# NumPy, on which Triton's interpreter runs, warns of what the kernel computes for padding and throws away.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")


def sliced(values, *, step=2, offset=1):
    """The same values with gaps in memory, not at the beginning of their storage."""
    base = torch.full((*values.shape[:-1], values.shape[-1] * step + offset), 7.0, dtype=values.dtype)
    view = base[..., offset::step][..., : values.shape[-1]]
    view.copy_(values)
    return view


LAYOUTS = {
    "transposed": lambda dtype: randn(66, 7).to(dtype).t(),
    "permuted": lambda dtype: randn(5, 14, 4).to(dtype).permute(2, 0, 1),
    "channels_last": lambda dtype: randn(4, 8, 3, 3).to(dtype).to(memory_format=torch.channels_last),
    "columns sliced": lambda dtype: sliced(randn(3, 130).to(dtype)),
    "vector sliced": lambda dtype: sliced(randn(100).to(dtype)),
    "expanded, one taken": lambda dtype: randn(6, 1).to(dtype).expand(6, 9)[:, 2:3],
    "0-d": lambda dtype: randn(4).to(dtype)[2],
    "empty": lambda dtype: randn(4, 0, 70).to(dtype).permute(2, 0, 1),
}
MODES = [
    (dtype, states, master, stochastic)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for states in ("fp8", "fp32")
    for master in ("remainder", "fp32", None)
    for stochastic in (True, False)
    if dtype == torch.bfloat16 or (dtype == torch.float16 and master == "fp32" and stochastic) or master is None
]


def train(optimizer, param, steps, start=0):
    for step in range(start, start + steps):
        # Gradients have strides of their own.
        grad = randn(*param.shape, seed=100 + step).to(param.dtype)
        param.grad = sliced(grad) if grad.ndim and step % 2 else grad
        optimizer.step()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "backend"),
    [*((layout, "reference") for layout in LAYOUTS), *product(("transposed", "0-d"), ADAMW_BACKENDS[1:])],
)  # both backends step a contiguous copy
def test_any_layout_steps_and_resumes_as_the_contiguous_copy(layout, backend):
    for dtype, states, master, stochastic in MODES:
        if backend == "triton" and not (stochastic and dtype == torch.bfloat16):
            continue  # the interpreter is slow
        settings = {"lr": 0.1, "states": states, "master": master, "stochastic_rounding": stochastic}
        param = nn.Parameter(LAYOUTS[layout](dtype))
        strides, start = param.stride(), param.detach().clone(memory_format=torch.contiguous_format)
        dense = nn.Parameter(start.clone())
        optimizer, other = AdamW([param], **settings), AdamW([dense], **settings)
        with ADAMW.force(backend):
            train(optimizer, param, 3)
            train(other, dense, 3)
            assert param.stride() == strides
            assert same((dense, other.state[dense]), (param, optimizer.state[param]))
            assert not param.numel() or not torch.equal(param, start)
            resumed = AdamW([param], **settings)
            resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
            train(resumed, param, 2, start=3)
            train(other, dense, 2, start=3)
            assert same((dense, other.state[dense]), (param, resumed.state[param]))


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
def test_parameters_in_one_storage_do_not_touch_each_other(backend):
    """Two that interlace, one between them that no optimizer has."""
    base = randn(64, 3, 80).bfloat16()
    before = base.clone()
    params = [nn.Parameter(base[:, 0]), nn.Parameter(base[:, 2].t())]
    twins = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    with ADAMW.force(backend):
        for some in (params, twins):
            optimizer = AdamW(some, lr=1e-2)
            for step in range(2):
                for i, param in enumerate(some):
                    param.grad = randn(*param.shape, seed=10 * step + i).bfloat16()
                optimizer.step()
    assert same(twins, params)
    assert torch.equal(base[:, 1], before[:, 1]) and not torch.equal(base[:, 0], before[:, 0])


def test_elements_that_share_memory_are_refused():
    with pytest.raises(ValueError, match=r"elements of a parameter \[4, 64\] share memory.*contiguous copy"):
        AdamW([nn.Parameter(torch.zeros(4, 1).expand(4, 64))])
