import pytest
import torch

from support.llamas import counting_rows, forget_settings, small_llama


@pytest.fixture
def llama():
    return small_llama


@pytest.fixture
def samples():
    return [{"input_ids": row, "labels": row} for row in counting_rows(64)]


@pytest.fixture
def batches(samples):
    """Four batches of the first samples."""
    return torch.stack([row["input_ids"] for row in samples[:16]]).split(4)


@pytest.fixture
def harmed(llama):
    """A model with one huge channel, which a scale per tensor cannot hold."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 3] *= 3e5
        model.model.layers[0].mlp.up_proj.weight[3] *= 3e4
    return model


@pytest.fixture
def fresh_settings():
    yield
    forget_settings()
