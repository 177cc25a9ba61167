"""The loss against PyTorch's, and against itself in parts."""

import pytest
import torch
import torch.nn.functional as F

from ds_gpt.learning.loss import IGNORE_INDEX, cross_entropy_sum


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = (torch.randn(4, 6, 17) * 3).requires_grad_()
    targets = torch.randint(17, (4, 6))
    targets[0, 2:] = IGNORE_INDEX
    targets[3, 0] = IGNORE_INDEX
    return logits, targets


def torch_sum(logits, targets, **options):
    return F.cross_entropy(logits.flatten(end_dim=1), targets.flatten(), reduction="sum", **options)


def test_without_smoothing_is_pytorchs_bit_for_bit(batch):
    logits, targets = batch
    loss, count = cross_entropy_sum(logits, targets)
    expected = torch_sum(logits, targets)
    assert torch.equal(loss, expected)
    assert count.item() == 19 and count.dtype == torch.int64
    assert torch.equal(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


@pytest.mark.parametrize("smoothing", [0.1, 0.5, 0.99])
def test_with_smoothing_is_pytorchs(batch, smoothing):
    logits, targets = batch
    loss, count = cross_entropy_sum(logits, targets, label_smoothing=smoothing)
    expected = torch_sum(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    assert count.item() == 19
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


def test_smoothing_by_hand():
    logits, targets = torch.tensor([[[2.0, 0.0, -1.0]]]), torch.tensor([[0]])
    log_probs = logits[0, 0] - torch.logsumexp(logits[0, 0], dim=0)
    loss, _ = cross_entropy_sum(logits, targets, label_smoothing=0.3)
    torch.testing.assert_close(loss, -(0.7 * log_probs[0] + 0.3 * log_probs.mean()))


def test_parts_add_up_to_the_mean_over_all_tokens(batch):
    logits, targets = batch
    parts = [cross_entropy_sum(logits[i : i + 1], targets[i : i + 1]) for i in range(4)]
    mean = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
    torch.testing.assert_close(mean, F.cross_entropy(logits.flatten(end_dim=1), targets.flatten()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_counted_is_zero_with_zero_gradients(batch, smoothing):
    logits, targets = batch
    loss, count = cross_entropy_sum(logits, torch.full_like(targets, IGNORE_INDEX), smoothing)
    loss.backward()
    assert loss.item() == 0 and count.item() == 0
    assert logits.grad.eq(0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_tokens_get_no_gradient(batch, smoothing):
    logits, targets = batch
    cross_entropy_sum(logits, targets, smoothing)[0].backward()
    assert torch.equal(logits.grad.ne(0).any(dim=-1), targets != IGNORE_INDEX)


def test_another_ignore_index():
    logits, targets = torch.randn(1, 3, 5), torch.tensor([[1, 0, 2]])
    loss, count = cross_entropy_sum(logits, targets, ignore_index=0)
    torch.testing.assert_close(loss, torch_sum(logits, targets, ignore_index=0))
    assert count.item() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_fp32(dtype):
    torch.manual_seed(0)
    logits = torch.randn(2, 512, 33, dtype=dtype, requires_grad=True)
    targets = torch.randint(33, (2, 512))
    loss, _ = cross_entropy_sum(logits, targets, label_smoothing=0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch_sum(logits.float(), targets, label_smoothing=0.1))
    loss.backward()
    assert logits.grad.dtype == dtype


def test_one_large_fp32_tensor_is_kept_for_backward():
    """The log-probabilities, and neither the logits nor a copy of them."""
    saved = {}
    logits = torch.randn(2, 512, 33, dtype=torch.bfloat16, requires_grad=True)

    def keep(tensor):
        if tensor.numel() == logits.numel():
            saved[tensor.data_ptr()] = tensor.dtype
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy_sum(logits, torch.zeros(2, 512, dtype=torch.long), label_smoothing=0.1)
    assert list(saved.values()) == [torch.float32]
