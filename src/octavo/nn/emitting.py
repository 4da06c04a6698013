"""Norms and gated MLPs that emit the FP8 form of their result, so that the linears which read it need no pass for X.

    y = weight · normed            one kernel multiplies, rounds y and quantizes it (`octavo.kernels.multiply`)
    h = act(gate) · up             likewise

The factors come from the module's own operations (`octavo.activations.factors`), and y and its FP8 form are those of
`torch.mul` and `quantize`, bit for bit. The gradients are those of `torch.mul`, and forward saves the same tensors for
backward: the factors, exactly. Nothing is stored in FP8 but X, which the linear saves anyway.

A module does not know who reads its result. So its `Emitter` puts the result into the cache of casts that sibling
linears share (`octavo.nn.input_casts`), and notes which cast a linear adds there: from then on the module emits that
one. The linears find it as they find a sibling's. If no linear reads the casts in `TRIES` forwards (a norm before a
vocabulary head, a hook that replaces the result), the module runs its own code, and tries again at each `AGAIN`th.

The module's own code runs

- on results of fewer than `FEWEST` elements, where the pass that is saved takes the GPU less time than Octavo's
  autograd function takes the host beyond PyTorch's own multiplication (docs/host_time.md);
- on devices other than GPUs, unless `emit="always"`;
- without autograd, under torch.compile, which fuses casts itself, in functorch transforms, forward-mode derivatives,
  dispatch and function modes (selective checkpointing, fake tensors), tensor subclasses, CUDA graph captures and inside
  `octavo.disabled()`;
- if a linear's cast is not by row with float32 scales, has an amax history or channel scales.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.activations.detect import original_class
from octavo.activations.factors import Factors, factored, factors_of
from octavo.activations.modules import mixed_class
from octavo.kernels import needs_both_orders
from octavo.kernels.direct import Plans
from octavo.kernels.multiply import multiply, plan_multiply, supports
from octavo.kernels.registry import CHOICES, GPU_TYPES, triton_unsupported
from octavo.nn.filters import sizes
from octavo.nn.input_casts import AGAIN, INPUT_CASTS, TRIES, InputCasts, Readers
from octavo.nn.linear_subclasses import is_converted
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.names import nearest
from octavo.numerics.plan import Plan
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.execution_context import is_capturing, stream_of
from octavo.runtime.swap import become, has_own_forward, is_fully_sharded
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import (
    apply_of,
    eager_signature,
    explain_freed_nodes,
    guard_of,
    short_backward,
)
from octavo.tensor import Order

ATTRIBUTE = "octavo_emitter"
"""Attribute of a module that emits: its `Emitter`."""
FEWEST = 1 << 26
"""Fewest elements of a result that is emitted on a GPU."""


class Emitter(Readers):
    """What a module emits, and whether linears read it.

    Attributes:
        unread: Forwards since a linear read or made a cast of a result.
    """

    __slots__ = ("always", "both", "key", "match", "spec", "width")

    def __init__(self, width: int, always: bool) -> None:
        super().__init__()
        # both: Whether they were made for wgrad, too.
        # key: Their key in the cache.
        # width: Columns of the result.
        # always: Whether to emit on any device, whatever the size.
        self.width, self.always, self.both, self.key = width, always, False, ()
        self.spec: QuantSpec | None = None  # Spec of the casts that a linear made; None before
        # A check for factors like those of the last emission, and their call.
        self.match: tuple[Callable[..., bool], _Call] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Emitter, (self.width, self.always)

    def note(self, key: Any) -> None:
        """Note that a linear made a cast with this key."""
        spec, spec_t, source = key
        if source is None and spec_t in (None, spec) and supports(parsed := QuantSpec.parse(spec)):
            self.spec, self.both, self.key, self.unread = parsed, spec_t is not None, key, 0

    def due(self) -> bool:
        """Count a forward; return whether to emit or to look who reads it."""
        self.unread = unread = self.unread + 1
        return unread <= TRIES or not unread % AGAIN

    def offer(self, y: Tensor, cast: InputCasts | None = None) -> None:
        """Put y into the cache, with its cast if there is one."""
        casts = _NotedCasts(self)
        if cast is not None:
            dict.__setitem__(casts, self.key, cast)
        INPUT_CASTS.offer(y, casts, (None, stream_of(y.device), False) if y.is_cuda else (None,))


class _NotedCasts(dict[Any, Any]):
    """Casts of a result. Its emitter notes what a linear adds or reads."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__()
        self.emitter = emitter
        super().__setitem__(Readers, emitter)

    def __setitem__(self, key: Any, cast: Any) -> None:
        super().__setitem__(key, cast)
        self.emitter.note(key)


class Emitting(nn.Module):
    """Base class of modules that emit, and only of those."""


EMIT = "auto", "always", "never"
"""Values of `emit`."""
HOW = {
    "norm": "norm: one kernel multiplies by the weight and quantizes the result for the linears that read it",
    "glu": "gated MLP: one kernel multiplies and quantizes the input of the down projection",
}
"""What a report says of the modules that emit."""


def check_emit(value: str) -> None:
    """Raise ValueError unless `value` is a value of `emit`."""
    if value not in EMIT:
        raise ValueError(f"emit is {', '.join(map(repr, EMIT))}; got {value!r}{nearest(str(value), EMIT)}")


def emitting_modules(modules: Mapping[str, nn.Module], plan: Plan, emit: str) -> dict[str, tuple[str, int]]:
    """Return which modules of a converted model may emit: by name, what they are and the columns of their result."""
    # Norms beside or above a converted linear with as many inputs, and gated MLPs whose down projection is converted,
    # if their code is known and linears of their recipe have scales by row. `"auto"`: only where a GPU with Triton is.
    if emit == "never" or plan.fp8_activations or (emit == "auto" and not _emits_here()):
        return {}
    readers = {fqn: m for fqn, m in modules.items() if is_converted(m) and _reads(m.recipe)}
    emitting = {}
    for fqn, module in modules.items():
        known = factored(module)
        if known is None or has_own_forward(module) or is_fully_sharded(module):
            continue
        if known.kind == "glu":
            down = module._modules.get(known.names["down"])
            width = sizes(down)[0] if any(down is reader for reader in readers.values()) else 0  # type: ignore[arg-type]
        else:
            weight, parent = module._parameters.get(known.names["weight"]), fqn.rpartition(".")[0]
            below = (m for name, m in readers.items() if not parent or name.startswith(f"{parent}."))
            width = 0 if weight is None or weight.ndim != 1 else weight.numel()
            width = width if any(sizes(reader)[0] == width for reader in below) else 0
        if width and _becomes_emitting(module, known.kind):
            emitting[fqn] = known.kind, width
    return emitting


def _emits_here() -> bool:
    """Return whether this machine has a device on which `multiply` is one kernel."""
    return torch.cuda.is_available() and triton_unsupported(torch.device("cuda"), ()) is None


def _reads(recipe: Recipe) -> bool:
    """Return whether linears of a recipe can read what is emitted."""
    one_form = recipe.wgrad_x in (None, recipe.x)
    return one_form and supports(recipe.x) and not (recipe.history or recipe.equalization or recipe.weight_only)


def _becomes_emitting(module: nn.Module, kind: str) -> bool:
    try:
        _emitting_class(module, kind)
    except Exception:  # any error of making a subclass: such a module keeps its own code
        return False
    return True


def _emitting_class(module: nn.Module, kind: str) -> type[nn.Module]:
    original: Any = type(module)
    emitting: type[nn.Module] = mixed_class(_MIXINS[kind], original)
    return emitting


def enable_emitting(module: nn.Module, kind: str, width: int, emit: str) -> None:
    """Make a module emit, in place."""
    become(module, _emitting_class(module, kind), **{ATTRIBUTE: Emitter(width, emit == "always")})


def disable_emitting(module: nn.Module) -> None:
    """Undo `enable_emitting`."""
    become(module, original_class(module))
    del vars(module)[ATTRIBUTE]


def emits(module: nn.Module) -> str | None:
    """Return what a module that emits is, a key of `HOW`; None for others."""
    return next((kind for kind, mixin in _MIXINS.items() if isinstance(module, mixin)), None)


class EmittingNorm(Emitting):
    """A norm that emits the FP8 form of its result."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the same as the original."""
        x = None if torch.compiler.is_compiling() or kwargs or len(args) != 1 else args[0]
        emitter: Emitter | None = emitter_for(self, x)
        if emitter is None:
            return super().forward(*args, **kwargs)
        known = factored(self) if emitter.spec is not None else None
        factors = None if known is None or x is None else factors_of(self, known, x)
        if factors is None:
            y = super().forward(*args, **kwargs)
            offered(emitter, y)
            return y
        return emitted(emitter, factors)


class EmittingGlu(Emitting):
    """A gated MLP that emits the FP8 form of act(gate) · up for its down projection."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the same as the original."""
        x = None if torch.compiler.is_compiling() or kwargs or len(args) != 1 else args[0]
        emitter: Emitter | None = emitter_for(self, x)
        known = None if emitter is None else factored(self)
        factors = None if known is None or x is None else factors_of(self, known, x)
        if factors is None or known is None or emitter is None:
            return super().forward(*args, **kwargs)
        down: Any = self._modules[known.names["down"]]
        return down(emitted(emitter, factors))


_MIXINS: dict[str, Any] = {"norm": EmittingNorm, "glu": EmittingGlu}


def emitter_for(module: nn.Module, x: Any) -> Emitter | None:
    """Return the emitter of a module that may emit in this forward."""
    if type(x) is not Tensor or SWITCH.off or not torch.is_grad_enabled():
        return None
    emitter: Emitter = vars(module)[ATTRIBUTE]
    if not emitter.always:
        if x.device.type not in GPU_TYPES or not x.ndim or x.numel() * emitter.width < FEWEST * x.shape[-1]:
            return None
    if not emitter.due():
        return None
    if eager_signature(x, records=True) is None or is_capturing(x.device):
        return None
    return emitter


def offered(emitter: Emitter, y: Any) -> None:
    """Offer a result of the module's own code, to learn who reads it."""
    if type(y) is Tensor and y.dtype in SUPPORTED_DTYPES and y.ndim > 0:
        emitter.offer(y)


def emitted(emitter: Emitter, factors: Factors) -> Tensor:
    """Return the product of factors, and put its FP8 form into the cache."""
    left, right, dtype = factors
    call = None if emitter.spec is None else _call_of(emitter, left, right, dtype)
    if call is None:
        y = left * right
        y = y if y.dtype == dtype else y.to(dtype)
        offered(emitter, y)
        return y
    casts: list[InputCasts] = []
    result: Tensor = _APPLY(left, right, call, casts)
    emitter.offer(result, casts[0])
    return result


class _Call:
    """Multiplication of factors of one signature, and quantization of the result."""

    __slots__ = ("options", "promoted", "run")

    def __init__(
        self, left: Tensor, right: Tensor, dtype: torch.dtype, spec: QuantSpec, both: bool, options: Any
    ) -> None:  # fmt: skip
        self.options = options  # What it was made for besides the factors
        promoted = torch.promote_types(left.dtype, right.dtype)
        # Dtype of the product, if the result has another one; else None.
        self.promoted = None if promoted == dtype else promoted
        self.run = _run_of(left, right, dtype, spec, both)  # Returns the result and its cast


def _run_of(left: Tensor, right: Tensor, dtype: torch.dtype, spec: QuantSpec, both: bool) -> Any:
    """Return `_Call.run`; None for factors that `multiply` does not take, or whose product has gaps."""
    swapped = left.ndim < right.ndim
    a, b = (right, left) if swapped else (left, right)
    shape, columns = a.shape, a.shape[-1]
    if not a.numel() or a.device != b.device or b.shape not in (shape, shape[-1:]):
        return None
    if not {a.dtype, b.dtype, dtype} <= set(SUPPORTED_DTYPES):
        return None
    a_meta, b_meta = (torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device="meta") for f in (a, b))
    if not (a_meta * b_meta).is_contiguous():
        return None
    rows = a.numel() // columns

    try:
        first, second = a.detach().view(rows, columns), b.detach() if b.ndim == 1 else b.detach().view(rows, columns)
    except RuntimeError:  # strides that no matrix has
        return None
    order: Order = "both" if both and needs_both_orders(a.device) else "rows"
    plan = plan_multiply(first, second, dtype, spec, order, shape) if a.device.type in GPU_TYPES else None

    def general(left: Tensor, right: Tensor) -> tuple[Tensor, InputCasts]:
        a, b = (right, left) if swapped else (left, right)
        y, x = multiply(a.view(rows, columns), b if b.ndim == 1 else b.view(rows, columns), dtype, spec, order)
        x_t = (x.data if x.other_order is None else x.other_order) if both else None
        return torch.ops.aten._unsafe_view(y, shape), (x.data, x_t, x.scale, x.scale if both else None)

    if plan is None:
        return general

    def planned(left: Tensor, right: Tensor) -> tuple[Tensor, InputCasts]:
        y, q, q_t, s = plan.run(right, left) if swapped else plan.run(left, right)
        return y, (q, q_t, s, s)

    return planned


def _call_of(emitter: Emitter, left: Tensor, right: Tensor, dtype: torch.dtype) -> _Call | None:
    options = emitter.spec, emitter.both, dtype, CHOICES.changes
    match = emitter.match
    if match is not None and match[1].options == options and match[0](left, right):
        return match[1]
    spec = emitter.spec
    tensors = eager_signature(left, right, records=True)
    if tensors is None or spec is None:
        return None
    key = tensors, options
    call = _CALLS.get(key) or _CALLS.add(key, _Call(left, right, dtype, spec, emitter.both, options))
    if call.run is None:
        return None
    if (guard := guard_of(left, right)) is not None:
        emitter.match = guard, call
    return call


_CALLS: Plans[_Call] = Plans()


@short_backward
@explain_freed_nodes
class _Multiply(torch.autograd.Function):
    """The product of two factors, with the gradients and saved tensors of `torch.mul` (and a conversion)."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, call: _Call, casts: list[InputCasts]) -> Tensor:
        y: Tensor
        y, cast = call.run(left, right)
        casts.append(cast)
        needs_left, needs_right = ctx.needs_input_grad[:2]
        # In the order of torch.mul: checkpointing may have run that in forward and this again, or the reverse.
        ctx.save_for_backward(right if needs_left else None, left if needs_right else None)
        ctx.promoted = call.promoted
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        right, left = ctx.saved_tensors
        g = g if ctx.promoted is None else g.to(ctx.promoted)
        # The engine sums over the dimensions of a vector and converts dtypes, as after torch.mul.
        return None if right is None else g * right, None if left is None else g * left, None, None


_APPLY = apply_of(_Multiply)
