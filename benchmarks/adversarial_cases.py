"""Models and data that are known to break FP8: what `python -m benchmarks adversarial` trains.

Nothing here touches a quantizer: the numbers are those of ordinary modules, in a state that the literature reports of
real ones. Each case is built to need another remedy, which the docstring of its model gives with the reason.
"""

import functools

import torch
from torch import Tensor, nn

from benchmarks.adversarial_task import BYTES, CONTEXT, WIDTH, Case, Gated, OneHot, Squared, losses

OUTLIERS, OUTLIER_GAIN = (133, 198), 1000.0
PRETRAINING = 200


@functools.cache
def _pretrained(seed: int, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Gated()
    losses(Case(name="pretraining", build=lambda *_: model, steps=steps), model, seed)
    return model.state_dict()


def loud_channels(seed: int, quiet: float) -> nn.Module:
    """A trained model two of whose 256 norm weights are 1000 times the others, with the columns of the next weights
    divided by as much: the same function. e4m3 spans 2¹⁸ with its subnormals, so values a thousand times below the
    largest keep nearly all of their precision. Int8, for which such outliers were described (LLM.int8(), Dettmers et
    al., arXiv 2208.07339), would lose them.
    """
    return _with_gains(seed, quiet)


def _with_gains(seed: int, quiet: float) -> nn.Module:
    model = Gated()
    model.load_state_dict(_pretrained(seed, PRETRAINING))
    gain = torch.full((WIDTH,), quiet)
    gain[list(OUTLIERS)] = OUTLIER_GAIN
    with torch.no_grad():
        model.norm.weight.mul_(gain)
        for layer in (model.gate, model.up):
            layer.weight.div_(gain)
    return model


def outlier_channels(seed: int, quiet: float) -> nn.Module:
    """A trained model two of whose 256 norm weights are large and the rest small, with the columns of the next weights
    divided by as much: the same function, and bf16 does not notice. Every row of X has the outliers, so a scale per row
    is no better than one per tensor; the quiet channels, which carry the information, fall among e4m3's subnormals.
    Blocks along K part them: the 128 channels beside the outliers still suffer by block, 64 with groups of 32. Channel
    scales remove them. Known from SmoothQuant (Xiao et al., arXiv 2211.10438: norm weights make the outliers) and
    Massive Activations (Sun et al., arXiv 2402.17762: 10⁴ to 10⁵ times the median).
    """
    return _with_gains(seed, quiet)


ALIGNED, TRIGGER, MARGIN = 2, ord("\n"), 2.5


def swiglu_growth(seed: int, growth: float) -> nn.Module:
    """Late in training, rows of a SwiGLU's gate and up align and grow: their product is then quadratic in x, and some
    tokens have values in the input of `down` that are more than 10⁵ times all others. Weight decay does this in 2·10¹¹
    tokens (Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517, who saw delayed scaling
    diverge of it); here two pairs of rows begin aligned, with the embedding of a line's end, and grow 300-fold over the
    first half of the steps. One scale per tensor follows the spike and the other tokens underflow; a scale per row
    costs only the row that spikes.
    """
    torch.manual_seed(seed)
    model = Gated()
    with torch.no_grad():
        model.embed.weight[-BYTES:, -1] = 1.0  # a channel that is the same for all tokens, for the margin
        end_of_line = model.embed.weight[TRIGGER]
        row = torch.zeros(WIDTH)
        row[: len(end_of_line)] = end_of_line / end_of_line.norm()
        row[-1] = -MARGIN
        for layer in (model.gate, model.up):
            layer.weight[:ALIGNED] = row
    return model


def _grow(model: nn.Module, step: int, steps: int, growth: float) -> None:
    if step <= steps // 2:
        with torch.no_grad():
            for layer in (model.gate, model.up):
                layer.weight[:ALIGNED] *= growth ** (2 / steps)


def plain(seed: int, strength: float) -> nn.Module:
    """A SwiGLU whose loss is multiplied by 10⁻¹², so that all gradients are that much smaller than usual, as far from
    the output of deep networks or without loss scaling (Micikevicius et al., Mixed Precision Training, arXiv
    1710.03740). Just-in-time scales follow the tensor, so recipes with them lose nothing. fp16 would break, and
    implementations that keep scales above a floor such as 10⁻¹².
    """
    torch.manual_seed(seed)
    return Gated()


def spread_gradients(seed: int, sigma: float) -> nn.Module:
    """Weights of tokens in the loss that are log-normal (σ = 11), by the latest byte, so that gradients spread over 2⁵⁰
    and more within a tensor; those of a real network spread over dozens of powers of two (Micikevicius et al., arXiv
    1710.03740, figure 3), and importance weights spread them. Inputs are one-hot: tokens of small weight alone move
    their columns of the first weight, and Adam moves these as far as any (with a small enough ε: Wortsman et al., arXiv
    2309.14322). One scale for all tokens underflows them: e5m2 by tensor spans 2³², and e4m3 by column, which rowwise
    has in wgrad, only 2¹⁸. Blocks of tokens do not help either; wgrad in high precision does.
    """
    torch.manual_seed(seed)
    return OneHot()


@functools.cache
def _log_normal(sigma: float) -> Tensor:
    drawn = torch.randn(BYTES, generator=torch.Generator().manual_seed(7))
    return torch.exp(sigma * (drawn - drawn.max()))


def _by_byte(context: Tensor, sigma: float) -> Tensor:
    return _log_normal(sigma)[context[:, 0]]


def exploding_norms(seed: int, sigma: float) -> nn.Module:
    """Residual blocks without norms, where the stream grows with depth (De and Smith, arXiv 2002.10444), with squared
    ReLU, where it squares: the norms of tokens whose embeddings differ a few times in size, as those of frequent and
    rare words do (Schakel and Wilson, arXiv 1508.02297; here log-normal, σ = 1.25), lie 10⁹ and more apart three blocks
    later. The last norm rescales all tokens to one size, so each contributes to the loss. With one scale per tensor
    only the largest tokens survive. Scales per row are unaffected; folded into G they also cancel the spread of G,
    which shrinks as X grows.
    """
    torch.manual_seed(seed)
    model = Squared()
    with torch.no_grad():
        model.embed.weight.mul_(torch.exp(sigma * torch.randn(CONTEXT * BYTES, 1)))
    return model


_ALL = ("delayed", "tensorwise", "rowwise", "rowwise_equalized", "rowwise_hp_wgrad", "blockwise", "mxfp8")
_BUT_TENSORWISE = _ALL[2:]
CASES = {
    case.name: case
    for case in (
        Case(
            name="loud_channels", build=loud_channels, learning_rate=3e-4, first=PRETRAINING,
            slow={"norm": 1e-5, "gate": 1e-5, "up": 1e-5}, holds=_ALL,
        ),
        Case(
            name="outlier_channels", build=outlier_channels, learning_rate=3e-4, first=PRETRAINING,
            slow={"norm": 1e-5, "gate": 1e-5, "up": 1e-5},
            strength=0.003, others=(0.1, 0.01), unit="factor of the quiet norm weights",
            breaks=("delayed", "tensorwise", "rowwise", "rowwise_hp_wgrad"), holds=("rowwise_equalized", "mxfp8"),
        ),
        Case(
            name="swiglu_growth", build=swiglu_growth, after_step=_grow, strength=300.0, others=(10.0, 30.0, 100.0),
            unit="growth of the aligned rows",
            breaks=("delayed", "tensorwise"), holds=_BUT_TENSORWISE,
        ),
        Case(name="tiny_gradients", build=plain, loss_scale=1e-12, epsilon=1e-20, holds=_ALL),
        Case(
            name="spread_gradients", build=spread_gradients, steps=240, weights=_by_byte, epsilon=1e-18,
            strength=11.0, others=(4.0, 7.0, 9.0), unit="σ of the logarithm of the weights",
            breaks=("delayed", "tensorwise", "rowwise", "blockwise"), holds=("rowwise_hp_wgrad",),
        ),
        Case(
            name="exploding_norms", build=exploding_norms, learning_rate=1e-3,
            strength=1.25, others=(0.0, 0.75, 1.0, 1.5), unit="σ of the logarithm of the embeddings' norms",
            breaks=("delayed", "tensorwise"), holds=_BUT_TENSORWISE,
        ),
    )
}  # fmt: skip
