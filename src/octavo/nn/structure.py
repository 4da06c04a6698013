"""Which modules can store their activations in FP8, found by what they are made of and by what they compute.

No list of models: a norm, an activation or a gated MLP is run on small random inputs, in float32 on the CPU, with
small weights in the place of its own, and compared with the functions that we know. What computes one of them is
taken, be it `LlamaRMSNorm`, Gemma's norm with its 1 + weight, or `NewGELUActivation`; what does not, or cannot be run
so, stays as it is, and `octavo.report` says so. It must do so in training as in evaluation (which finds dropout), on
inputs a million times larger (which finds a clamp) and, for a norm, at its own width (which finds groups).

What runs is a copy without hooks and with copies of its other children, and random numbers are put back, so a model is
not touched. Nothing of it is read but its structure: this works on meta and fake tensors.

Attention is taken by its projections alone, as nothing is replaced there but what its operations keep. Mixers that are
recurrences have projections of the same names; what they keep are decays that are multiplied along the sequence, too
sensitive for FP8. They are told apart by the parameters and the short convolution that they need.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from octavo.nn.activations import Activation, Glu, Scope, Storage, is_storing
from octavo.nn.storing import Norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Children of a gated MLP: gate, up, down."""
_JOINT = (("gate_up_proj", "down_proj"),)
"""Children of a gated MLP that computes gate and up in one product: both, down."""
_QKV = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"), ("c_attn",), ("qkv",), ("qkv_proj",), ("query_key_value",), ("Wqkv",),
)  # fmt: skip
_JOINED = ("in_proj",)
"""The projection to q, k and v of some attention, and to something else in many other modules."""
_OUT = ("o_proj", "out_proj", "c_proj", "dense", "proj", "o", "wo", "to_out", "Wo")
_RECURRENT = ("A_log", "dt_bias", "dt_proj", "x_proj", "igate", "fgate", "igate_preact", "fgate_preact", "rg_lru")
"""Parameters and children of a recurrence."""
_ACTIVATION_NAMES = ("silu", "swish", "gelu", "activation")
_WIDTH, _HIDDEN, _TOKENS = 8, 16, 6
_SIZES = (1.0, 1e3, 1e6)
"""Factors of the inputs of a probe."""
_TOLERANCE = 1e-4
_TOLERANCE_OF_LARGEST = 1e-5


def recognised(module: nn.Module, known: dict[Any, Storage | str] | None = None) -> Storage | str | None:
    """What a module computes, as far as storing its activations goes.

    Args:
        module: Any module.
        known: What was found of other modules of the same model, and gets what is found of this one: those that are
            made alike are looked at once.

    Returns:
        How to store them; or, for a module of a kind that might have been, why it stays as it is; or None for others.
    """
    find = _finder(module)
    if find is None:
        return None
    kind = type(module).__name__
    if type(module).__name__.startswith("FSDP"):
        return "sharded by fully_shard already: convert before sharding"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (by a hook of accelerate, say), so it would not be used"
    known = {} if known is None else known
    if (made := _made_of(module)) not in known:
        known[made] = find(module)
    found = known[made]
    return f"{kind} {found}" if isinstance(found, str) else found


def _made_of(module: nn.Module) -> Any:
    """What decides what a module computes but for the values of its parameters; the module itself where it has hooks.

    Attributes that are not plain count as the same where they are one object, which the model keeps alive.
    """
    if _hooked(module):
        return module
    ordinary = vars(nn.Module()).keys()
    parts: list[Any] = []
    for fqn, part in module.named_modules():
        parts += [fqn, type(part), part.training]
        for name, value in vars(part).items():
            if name not in ordinary:
                plain = isinstance(value, str | bool | int | float | None)
                parts.append((name, value if plain else id(value)))
        parts += [(name, None if p is None else p.shape) for name, p in part._parameters.items()]
        parts += [(name, id(buffer)) for name, buffer in part._buffers.items()]
    return tuple(parts)


def around(module: nn.Module) -> Storage | str:
    """The storage of a linear that is there to keep its input in FP8, or why it cannot be: it is no linear."""
    assert not is_storing(module)
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
    return Scope(kind="mlp") if matrix else f"{type(module).__name__} is not a linear layer"


def _finder(module: nn.Module) -> Callable[[nn.Module], Storage | str] | None:
    """Who looks closer at a module, by its name and children."""
    name, children = type(module).__name__.lower(), dict(module.named_children())
    own = dict(module.named_parameters(recurse=False))
    if (not children and isinstance(module, nn.LayerNorm | nn.RMSNorm)) or (not children and own and "norm" in name):
        return None if "batchnorm" in name or "groupnorm" in name or "instancenorm" in name else _norm
    if not children and not own and any(part in name for part in _ACTIVATION_NAMES):
        return _activation
    if any(_matrices(children, names) for names in (*_GATED, *_JOINT)):
        return _gated
    if any(_matrices(children, names) for names in _QKV) or (children and ("attention" in name or _has_joined(module))):
        return _attention
    return None


def _norm(module: nn.Module) -> Storage | str:
    own = dict(module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if own or weight is None:
        return "has no weight, or more than weight and bias: not a norm known here"
    if weight.ndim != 1:
        return f"has a weight of {weight.ndim} dimensions: only norms over the last one are known here"
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)
    native = type(module) in (nn.LayerNorm, nn.RMSNorm)
    if eps is not None and not isinstance(eps, float):
        return f"has an epsilon of {eps!r}"
    if native:
        return Norm(eps=eps, center=type(module) is nn.LayerNorm, native=True)
    if eps is None:
        return "has no epsilon under a name known here"
    with _probing():
        g = torch.Generator().manual_seed(0)
        width = weight.numel()
        w, b = (torch.rand(width, generator=g, device="cpu") + 0.5 for _ in range(2))
        parameters = {"weight": nn.Parameter(w)} | ({} if bias is None else {"bias": nn.Parameter(b)})
        x = torch.randn(2, 3, width, generator=g, device="cpu")
        near_eps = x * max(eps, 1e-12) ** 0.5 * 2 + 0.1 * eps**0.5
        outlier = x.flatten(0, 1).clone()
        outlier[:, 0] *= 1e2
        for offset, center in ((False, False), (True, False), (False, True)):

            def normed(x: Tensor, offset: bool = offset, center: bool = center) -> Tensor:
                values = x - x.mean(-1, keepdim=True) if center else x
                y = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + offset)
                return y if bias is None else y + b

            if (center or bias is None) and _computes(normed, module, parameters, {}, (near_eps, outlier, x * 1e3)):
                wide = _outcome(module, parameters, {}, x.bfloat16(), module.training)
                promotes = wide is not None and wide.dtype == torch.float32
                return Norm(eps=eps, offset=offset, center=center, promotes=promotes)
    return "computes no norm known here"


def _activation(module: nn.Module) -> Storage | str:
    if getattr(module, "inplace", False):
        return "works in place: what it is given is gone"
    with _probing():
        x = torch.linspace(-16, 16, 96, device="cpu").reshape(_TOKENS, _HIDDEN)
        for name, function in ACTIVATIONS.items():
            if _computes(function, module, {}, {}, [x * size for size in _SIZES]):
                return Activation(activation=name)
    return "computes neither silu nor gelu nor gelu_tanh"


def _gated(module: nn.Module) -> Storage | str:
    children = dict(module.named_children())
    with _probing():
        g = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=g, device="cpu")

        w = {name: weight(_HIDDEN, _WIDTH) for name in ("gate", "up")} | {"down": weight(_WIDTH, _HIDDEN)}
        x = weight(_TOKENS, _WIDTH)
        for glu, products in _candidates(children, w):
            for name, function in ACTIVATIONS.items():

                def gated(x: Tensor, function: Callable[[Tensor], Tensor] = function) -> Tensor:
                    return (function(x @ w["gate"].t()) * (x @ w["up"].t())) @ w["down"].t()

                replaced: dict[str, nn.Module] = {role: _Product(product) for role, product in products.items()}
                if _computes(gated, module, {}, replaced, [x * size for size in _SIZES]):
                    hooked = next((c for c, child in children.items() if c not in products and _hooked(child)), None)
                    if hooked is not None:
                        return f"has hooks on {hooked!r}, which would not be called"
                    return Glu(**glu, activation=name)
    return (
        "does not compute down(act(gate(x))·up(x)) and nothing else, in training as in evaluation and however large x "
        "is, with act one of silu, gelu, gelu_tanh"
    )


def _candidates(
    children: dict[str, nn.Module], w: dict[str, Tensor]
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Roles that the children of a gated MLP might play, and the products that they would then compute."""
    for gate, up, down in _GATED:
        if _matrices(children, (gate, up, down)):
            for a, b in ((gate, up), (up, gate)):
                yield {"gate": a, "up": b, "down": down}, {a: w["gate"], b: w["up"], down: w["down"]}
    for both, down in _JOINT:
        if _matrices(children, (both, down)):
            for first in (True, False):
                order = ("gate", "up") if first else ("up", "gate")
                products = {both: torch.cat([w[name] for name in order]), down: w["down"]}
                yield {"gate": both, "up": None, "down": down, "gate_first": first}, products


def _attention(module: nn.Module) -> Storage | str:
    children = dict(module.named_children())
    inside = {name.rpartition(".")[2] for name, _ in (*module.named_parameters(), *module.named_modules())}
    recurrent = next((name for name in _RECURRENT if name in inside), None)
    if recurrent is not None:
        return f"is a recurrence, as its {recurrent} shows: its decays are too sensitive for FP8"
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return "holds a convolution along the sequence, as recurrences do: their decays are too sensitive for FP8"
    if not any(_matrices(children, names) for names in _QKV) and not _has_joined(module):
        return "has no projections to q, k and v known here"
    if not any(isinstance(children.get(name), nn.Module) for name in _OUT):
        return "has no output projection known here"
    return Scope(kind="attention")


def _has_joined(module: nn.Module) -> bool:
    """Whether a module that is called attention projects to q, k and v by `in_proj`."""
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and _matrices(dict(module.named_children()), _JOINED)


def _matrices(children: dict[str, nn.Module], names: tuple[str, ...]) -> bool:
    """Whether there are children of these names, each with a matrix for a weight."""
    weights = [getattr(children.get(name), "weight", None) for name in names]
    return all(isinstance(weight, Tensor) and weight.ndim == 2 for weight in weights)


class _Product(nn.Module):
    """A linear layer of a probe."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _like(module: nn.Module, parameters: dict[str, Any], children: dict[str, nn.Module], training: bool) -> nn.Module:
    """A module of the same class and attributes, with other parameters and some children replaced, the others copied,
    without buffers and hooks.
    """
    probe = type(module).__new__(type(module))
    nn.Module.__init__(probe)
    fresh = dict(vars(probe))
    vars(probe).update({name: value for name, value in vars(module).items() if name not in fresh})
    probe.training = training
    probe._parameters = dict(parameters)
    probe._modules = {name: children.get(name) or _copied(child, training) for name, child in module._modules.items()}
    return probe


def _copied(child: nn.Module | None, training: bool) -> nn.Module | None:
    """A child on its own: its forward may count, move statistics, or be hooked."""
    if child is None:
        return None
    copy = _like(child, child._parameters, {}, training)
    copy._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in child._buffers.items()}
    return copy


def _hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or "forward" in vars(m)
        for m in module.modules()
    )


def _outcome(
    module: nn.Module, parameters: dict[str, Any], children: dict[str, nn.Module], x: Tensor, training: bool
) -> Tensor | None:
    """What a module makes of x, if it can be run on it and leaves it as it is."""
    given = x.clone()
    try:
        y = _like(module, parameters, children, training)(given)
    except Exception:  # whatever a forward that is not what we think it is may raise
        return None
    return y if isinstance(y, Tensor) and torch.equal(given, x) else None


def _computes(
    function: Callable[[Tensor], Tensor],
    module: nn.Module,
    parameters: dict[str, Any],
    children: dict[str, nn.Module],
    inputs: Sequence[Tensor],
) -> bool:
    """Whether a module gives what a function gives, in training and in evaluation."""
    return all(
        _close(_outcome(module, parameters, children, x, training), function(x))
        for training in (False, True)
        for x in inputs
    )


def _close(y: Tensor | None, expected: Tensor) -> bool:
    if y is None or y.shape != expected.shape:
        return False
    absolute = max(_TOLERANCE, _TOLERANCE_OF_LARGEST * float(expected.abs().amax()))
    return torch.allclose(y, expected, _TOLERANCE, absolute)


class _probing:
    """Real tensors on the CPU, nothing recorded, whatever modes are on; random numbers are put back."""

    def __enter__(self) -> None:
        self._modes: list[Any] = [
            unset_fake_temporarily(),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ]
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
