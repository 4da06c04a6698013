"""Models and batches without storage are like the real ones in everything but that."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP, llama
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from octavo.planner.fake import fake_batch, fake_copy, fake_tensors
from support.dispatch_modes import Passing

CPU = torch.device("cpu")


@pytest.mark.parametrize("origin", ["cpu", "meta"])
def test_a_copy_has_the_shapes_ties_and_flags_and_the_model_is_untouched(origin):
    with torch.device(origin):
        model = llama(tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    with fake_tensors() as mode:
        copy = fake_copy(model, mode, CPU)
        assert copy.lm_head.weight is copy.model.embed_tokens.weight
        for (name, real), (_, fake) in zip(model.named_parameters(), copy.named_parameters(), strict=True):
            assert isinstance(fake, FakeTensor) and fake.device == CPU, name
            assert (fake.shape, fake.dtype, fake.requires_grad) == (real.shape, real.dtype, real.requires_grad), name
        copy(input_ids=torch.zeros(2, 8, dtype=torch.int64)).logits.sum().backward()
    assert all(before[name] is p and p.grad is None for name, p in model.named_parameters())


def test_random_numbers_go_on_as_if_nothing_had_happened():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with fake_tensors():
        torch.manual_seed(5)
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_transformers_is_as_before_afterwards():
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    with fake_tensors():
        assert masking_utils.find_packed_sequence_indices is not before
    assert masking_utils.find_packed_sequence_indices is before


def test_batches_in_every_form():
    with fake_tensors():
        batch = {"input_ids": (2, 5), "pixel_values": (2, 3, 4, 4), "mask": torch.ones(2, 5, dtype=torch.bool), "n": 7}
        made = fake_batch(batch, None, torch.bfloat16, CPU)
        kinds = {name: (tuple(t.shape), t.dtype) for name, t in made.items() if isinstance(t, torch.Tensor)}
        assert kinds == {
            "input_ids": ((2, 5), torch.int64),
            "pixel_values": ((2, 3, 4, 4), torch.bfloat16),
            "mask": ((2, 5), torch.bool),
        }
        assert made["n"] == 7
        assert [t.shape[0] for t in fake_batch(((2, 5), torch.ones(2)), 9, torch.float32, CPU)] == [9, 9]
        assert fake_batch(torch.ones(3), None, torch.float32, CPU).shape == (3,)
        assert MLP()(fake_batch(torch.ones(3, 64), None, torch.float32, CPU)).shape == (3, 64)
        with pytest.raises(TypeError, match="mapping, a tuple or a tensor, of tensors or shapes; got str"):
            fake_batch("ids", None, torch.float32, CPU)


def attention_ops(device: str) -> list[str]:
    """Operations of attention whose values are narrower than queries and keys, forward and backward."""
    with fake_tensors(device):
        q, k, v = (torch.empty(2, 4, 16, size, dtype=torch.bfloat16, requires_grad=True) for size in (24, 24, 16))
        with Passing() as mode:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    return [func.__name__ for func in mode.seen]


def test_latent_attention_is_fused_on_gpus_and_not_on_cpus():
    before = F.scaled_dot_product_attention
    on_gpu, on_cpu = attention_ops("cuda"), attention_ops("cpu")
    assert "_scaled_dot_product_efficient_attention_backward.default" in on_gpu and "bmm.default" not in on_gpu
    assert "bmm.default" in on_cpu
    assert F.scaled_dot_product_attention is before


def test_what_pytorch_raises_it_does_not_print(caplog):
    with pytest.raises(RuntimeError, match="broadcast"), fake_tensors():
        torch.empty(4, 30) + torch.empty(4, 32)
    assert caplog.text == ""
    with pytest.raises(RuntimeError), FakeTensorMode():
        torch.empty(4, 30) + torch.empty(4, 32)
    assert "failed while attempting to run meta" in caplog.text  # outside as ever
