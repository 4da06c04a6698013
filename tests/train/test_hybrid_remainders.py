"""Held-out text whose last batch is smaller, on every mesh; padded rows, which meshes do not take."""

import re

import pytest
from test_hybrid import LAYOUTS, settings, slow  # noqa: F401  a fixture
from test_ranks import job, tables  # noqa: F401  a fixture

from octavo.train import ConfigError, parse_config, read_metrics
from octavo.train.data.load import load_corpus
from octavo.train.record.progress import NullProgress
from processes import gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp-tp", "tp-whole", "tp-fsdp", "cp"])
def test_the_last_batch_of_an_evaluation(gloo, settings, tmp_path, layout):  # noqa: F811
    """Six rows for batches of ten, so that ranks and micro-batches have five or one: losses are those of one process.

    In high precision, where a row too many or too few would show.
    """
    world, parallel = LAYOUTS[layout]
    made = settings(
        parallel=parallel,
        optim={"batch": 10, "micro_batches": 2 if "pp" in parallel else 1, "lr": 1e-3},
        run={"steps": 3},
        eval={"every": 1, "fraction": 0.3, "batches": 100},
        precision={"parameters": "fp32"},
    )
    config = parse_config(made | {"parallel": {}})
    data = load_corpus(config.data, config.model, NullProgress(), config.eval)
    assert data.held_out.windows % 10 == 6
    gloo.run(job, world, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    rows, expected = (read_metrics(tmp_path / name) for name in ("ranks", "one"))
    assert len(rows) == 3
    for row, of_one in zip(rows, expected, strict=True):
        assert row.held_out == pytest.approx(of_one.held_out, rel=3e-4)


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "ep"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"packing": "documents"}, 'data.packing = "documents" with parallel.{} = 2: only data parallelism keeps'),
        ({"packing": "none"}, 'data.packing = "none" with parallel.{} = 2: only data parallelism keeps'),
        ({"format": "messages"}, 'data.format = "messages" with parallel.{} = 2: only data parallelism weighs'),
    ],
    ids=str,
)
def test_targets_that_do_not_count_need_data_parallelism(settings, name, data, message):  # noqa: F811
    """On every rank alike: before any of them starts."""
    made = settings(optim={"micro_batches": 2})
    with pytest.raises(ConfigError, match=re.escape(message.format(name))):
        parse_config(made | {"parallel": {name: 2}, "data": made["data"] | data})
