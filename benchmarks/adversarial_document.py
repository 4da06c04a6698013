"""docs/adversarial.md and its picture, of a result file of the adversarial benchmark."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import figures
from benchmarks.adversarial_cases import CASES
from octavo.experiments.theme import colour

Row = dict[str, Any]
IMAGE = "images/adversarial.svg"
BASELINE, FP32 = "bf16", "fp32"
WITH_AUTOPILOT, WITHOUT_REPEATS = "autopilot", "autopilot, each step once"
PLAINEST = ("tensorwise", "rowwise")
"""Recipes that are also measured at other strengths of a case."""
RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_equalized", "blockwise", "mxfp8", "rowwise_hp_wgrad")
EVERY = 5
"""Steps from one sample of the autopilot to the next."""
SMOOTH = 8
"""Steps that a point of a curve is the mean of."""
WORSE, WITHIN = 3.0, 1.0
"""Percent of bf16's loss above which a recipe is broken, and within which it holds, on every seed."""
COLOURS = ("var(--soft)", *(colour(slot) for slot in (4, 1, 0, 0, 2, 5, 3)), "var(--ink)", "var(--warn)")
DASHES = {"rowwise_equalized": "dot", WITH_AUTOPILOT: "dash", WITHOUT_REPEATS: "dash"}

HEAD = """# What breaks FP8

Written by `python -m benchmarks adversarial` ({minutes:.0f} minutes of one core, {device}); edit nothing here.

Small models in states that are known to be hard on FP8. Each is trained in bf16, in every recipe, under the autopilot,
and in fp32, which shows that bf16 itself loses nothing there. Arms of one seed start from the same weights
and see the same batches. The loss is the mean of the last tenth of the steps, in nats per byte, of predicting the next
byte of Python's standard library; gaps are to bf16 on the same seed. Holds: at most {within:g} % above on every seed;
**broken**: more than {worse:g} % above on every seed; lags: in between; diverged: not finite, or worse than a guess.

![loss over steps]({image})

{summary}
SQNR is the lowest, and underflow (the share of values that become zero) the largest, of all operands of all FP8 layers
in the last step, the median over seeds.{blind}

Both autopilots begin with `tensorwise` and sample the first step and each {every}th. `autopilot` takes a step again in
which a layer was moved, as `octavo train` does and the example in `octavo.inspect.Autopilot`, so that the optimizer
never sees those gradients. The other one takes each step once.{lesson}

The parameters of each case were increased until `tensorwise` broke on all seeds; `spread_gradients` needed 240 steps
for that (the others have 120).{later} The results show that such states exist and which recipes tolerate them, not how
common they are. The last table of each case lists weaker parameters.

"""
LATER = """ {arms} ran later on {device}, beside bf16 runs on that machine."""
BLIND = """ SQNR of a whole tensor does not detect these failures: each broken recipe has at least {least:.0f} dB,
because large values carry most of the signal energy and stay accurate. Underflow detects them."""


def gaps(rows: Sequence[Row], case: str, arm: str) -> list[float]:
    """Loss of an arm above bf16's of the same seed and machine, in percent, a seed each; inf where it diverged."""
    base = {row["seed"]: row["tail_mean"] for row in rows if row["case"] == case and row["arm"] == BASELINE}
    return [
        math.inf if row["diverged"] else 100 * (row["tail_mean"] / (row.get("baseline") or base[row["seed"]]) - 1)
        for row in rows
        if row["case"] == case and row["arm"] == arm
    ]


def verdict(loss_gaps: Sequence[float]) -> str:
    """One word for the gaps of an arm."""
    if all(math.isinf(gap) for gap in loss_gaps):
        return "diverges"
    if min(loss_gaps) > WORSE:
        return "broken"
    return "holds" if max(loss_gaps) <= WITHIN else "lags"


def document(content: Mapping[str, Any]) -> str:
    """docs/adversarial.md of a result file."""
    rows = content["rows"]
    names = [name for name in CASES if any(row["case"] == name for row in rows)]
    arms = [arm for arm in (*RECIPES, WITH_AUTOPILOT, WITHOUT_REPEATS) if any(row["arm"] == arm for row in rows)]
    head = HEAD.format(
        minutes=sum(row["cpu_s"] for row in rows) / 60, device=content["environment"]["device"], within=WITHIN,
        worse=WORSE, image=IMAGE, summary=_summary(rows, names, arms), blind=_blind(rows, names, arms), every=EVERY,
        lesson=_lesson(rows, names), later=_later(content.get("later", {})),
    )  # fmt: skip
    return _wrapped(head) + "\n".join(
        _section(rows, name, arms) + _others(content["strengths"], name) for name in names
    )


def _later(later: Mapping[str, Mapping[str, Any]]) -> str:
    """Which arms were trained on their own, in words."""
    devices = {facts["device"] for facts in later.values()}
    lists = {device: [f"`{arm}`" for arm, facts in later.items() if facts["device"] == device] for device in devices}
    return "".join(LATER.format(arms=" and ".join(arms), device=device) for device, arms in sorted(lists.items()))


def _wrapped(text: str) -> str:
    """Paragraphs that are no table, heading or image, in lines of at most 120 characters."""
    parts = text.split("\n\n")
    return "\n\n".join(
        part if part[:1] in "|#!" else textwrap.fill(part, 120, break_on_hyphens=False, break_long_words=False)
        for part in parts
    )


def _summary(rows: Sequence[Row], names: Sequence[str], arms: Sequence[str]) -> str:
    lines = [f"| case | {' | '.join(arms)} |", f"|---|{'---|' * len(arms)}"]
    for name in names:
        cells = [_cell(gaps(rows, name, arm)) for arm in arms]
        lines.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(loss_gaps: Sequence[float]) -> str:
    word = verdict(loss_gaps)
    mean = "" if any(map(math.isinf, loss_gaps)) else f" {statistics.mean(loss_gaps):+.1f} %"
    return (f"**{word}**" if word in ("broken", "diverges") else word) + mean


def _blind(rows: Sequence[Row], names: Sequence[str], arms: Sequence[str]) -> str:
    """Whether the SQNR of what breaks looks healthy, in words; nothing where it does not."""
    broken = [
        row["worst"]["sqnr"]
        for row in rows
        if row["arm"] in arms and row["worst"] is not None
        and verdict(gaps(rows, row["case"], row["arm"])) == "broken"
    ]  # fmt: skip
    return BLIND.format(least=min(broken)) if broken and min(broken) > 20 else ""


def _lesson(rows: Sequence[Row], names: Sequence[str]) -> str:
    """What taking a step again is good for, in words; nothing where it makes no difference."""
    saved = [
        f"{name} ends {statistics.mean(gaps(rows, name, WITHOUT_REPEATS)):+.1f} % without it"
        for name in names
        if verdict(gaps(rows, name, WITHOUT_REPEATS)) != "holds"
        and verdict(gaps(rows, name, WITH_AUTOPILOT)) == "holds"
    ]
    return f" It matters where the first steps do damage that stays: {'; '.join(saved)}." if saved else ""


def _others(strengths: Sequence[Row], name: str) -> str:
    mine = [row for row in strengths if row["case"] == name]
    if not mine:
        return ""
    lines = ["", f"| {CASES[name].unit} | {' | '.join(PLAINEST)} |", f"|---:|{'---|' * len(PLAINEST)}"]
    for strength in sorted({row["strength"] for row in mine}):
        here = [row for row in mine if row["strength"] == strength]
        lines.append(f"| {strength:g} | {' | '.join(_cell(gaps(here, name, arm)) for arm in PLAINEST)} |")
    return "\n".join(lines) + "\n"


def _section(rows: Sequence[Row], name: str, arms: Sequence[str]) -> str:
    mine = [row for row in rows if row["case"] == name]
    seeds = sorted({row["seed"] for row in mine})
    lines = [
        f"## {name}", "", _wrapped(CASES[name].why), "",
        f"| recipe | {' | '.join(f'seed {seed}' for seed in seeds)} | SQNR | largest underflow | |",
        f"|---|{'---:|' * (len(seeds) + 2)}---|",
    ]  # fmt: skip
    base = [f"{row['tail_mean']:.4f}" for row in mine if row["arm"] == BASELINE]
    lines.append(f"| {BASELINE} | {' | '.join(base)} | | | |")
    for arm in ([FP32] if any(row["arm"] == FP32 for row in mine) else []) + list(arms):
        of_arm = [row for row in mine if row["arm"] == arm]
        loss_gaps = gaps(rows, name, arm)
        cells = ["diverged" if math.isinf(gap) else f"{gap:+.2f} %" for gap in loss_gaps]
        lines.append(f"| {arm} | {' | '.join(cells)} | {_worst(of_arm)} | {verdict(loss_gaps)} |")
    for row in (row for row in mine if row["arm"] == WITH_AUTOPILOT and row["seed"] == seeds[0]):
        if row["moves"]:
            lines += [
                "",
                f"Moves of the autopilot, seed {seeds[0]}:",
                "",
                *(f"    {move}" for move in row["moves"]),
            ]
    return "\n".join(lines) + "\n"


def _worst(of_arm: Sequence[Row]) -> str:
    worst_values = [row["worst"] for row in of_arm if row["worst"] is not None]
    if not worst_values:
        return "| "
    noisy = statistics.median(worst["sqnr"] for worst in worst_values)
    starved = statistics.median_high(worst["underflow"] for worst in worst_values)
    where = next(worst["underflow_of"] for worst in worst_values if worst["underflow"] == starved)
    return f"{noisy:.1f} dB | {100 * starved:.1f} %" + (f" ({where})" if starved else "")


def picture(content: Mapping[str, Any]) -> figures.Figure:
    """Loss over steps, mean of the seeds, a panel per case and a line per arm."""
    rows = content["rows"]
    names = [name for name in CASES if any(row["case"] == name for row in rows)]
    axes = {"x": {"title": "step", "nticks": 5, "showgrid": False}, "y": {"title": "loss [nats per byte]", "nticks": 5}}
    titles = [name.replace("_", " ") for name in names]
    places, settings = figures.panels(titles, min(len(names), 3), 190, **axes, same_y=False)
    data = []
    for place, name in zip(places, names, strict=True):
        for arm, shade in zip((BASELINE, *RECIPES, WITH_AUTOPILOT, WITHOUT_REPEATS), COLOURS, strict=True):
            curves = [row["smoothed"] for row in rows if row["case"] == name and row["arm"] == arm]
            means = [statistics.mean(at) for at in zip(*curves, strict=False) if None not in at]
            line = {"color": shade, "width": 5 if arm == BASELINE else 1.6}
            line["dash"] = DASHES.get(arm, "solid")
            data.append(
                {"type": "scatter", "mode": "lines", "line": line, "opacity": 0.5 if arm == BASELINE else 0.9, **place,
                 "x": [SMOOTH * (number + 0.5) for number in range(len(means))], "y": means, "name": arm,
                 "legendgroup": arm, "showlegend": name == names[0]}
            )  # fmt: skip
    margin = {"l": 64, "r": 14, "t": 84, "b": 54, "pad": 4}
    height = settings.pop("height") + margin["t"] + margin["b"]
    legend = {"orientation": "h", "x": 0, "y": 1 + 26 / (height - margin["t"] - margin["b"]), "yanchor": "bottom"}
    return figures.figure(data, height, **settings, margin=margin, legend=legend)
