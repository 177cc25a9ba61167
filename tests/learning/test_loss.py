"""The loss against PyTorch's, and against itself in parts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ds_gpt.learning.loss import IGNORE_INDEX, cross_entropy_sum, linear_cross_entropy_sum, linear_log_probs


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


def hidden(rows: int = 60, vocabulary: int = 501, dtype: torch.dtype = torch.float32):
    """Hidden states (3, rows / 3, 16), a head's weight, and targets of which a third do not count."""
    torch.manual_seed(0)
    x = torch.randn(3, rows // 3, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (3, rows // 3))
    targets[1] = IGNORE_INDEX
    return x, weight, targets


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 59])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_by_chunks_loss_and_gradients_are_those_of_the_whole(smoothing, chunk_tokens):
    x, weight, targets = hidden()
    loss, counted = linear_cross_entropy_sum(x, weight, targets, smoothing, chunk_tokens)
    assert counted.item() == 40 and counted.dtype == torch.int64 and loss.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch_sum(F.linear(*exact), targets, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = zip(torch.autograd.grad(loss / 7, (x, weight)), torch.autograd.grad(expected / 7, exact), strict=True)
    assert max(distance(*pair) for pair in gradients) < 1e-6
    with torch.no_grad():
        evaluated = linear_cross_entropy_sum(x, weight, targets, smoothing, chunk_tokens)
    assert [value.item() for value in evaluated] == pytest.approx([expected.item(), 40], rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [None, 60, 1000])
def test_one_chunk_is_the_plain_loss_bit_for_bit(chunk_tokens):
    x, weight, targets = hidden()
    found = linear_cross_entropy_sum(x, weight, targets, 0.1, chunk_tokens)
    expected = cross_entropy_sum(F.linear(x, weight), targets, 0.1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_by_chunks_ignored_tokens_get_no_gradient_and_nothing_counted_is_zero():
    x, weight, targets = hidden()
    linear_cross_entropy_sum(x, weight, targets, 0.1, 7)[0].backward()
    assert torch.equal(x.grad.ne(0).any(dim=-1), targets != IGNORE_INDEX)
    loss, counted = linear_cross_entropy_sum(x, weight, torch.full_like(targets, IGNORE_INDEX), 0.1, 7)
    assert loss.item() == 0 and counted.item() == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, (x, weight)))


def test_by_chunks_a_frozen_head_costs_no_gradient():
    x, weight, targets = hidden()
    expected = torch.autograd.grad(linear_cross_entropy_sum(x, weight, targets, 0.0, 7)[0], x)[0]
    loss, _ = linear_cross_entropy_sum(x, weight.detach(), targets, 0.0, 7)
    loss.backward()
    assert torch.equal(x.grad, expected) and weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_by_chunks_half_precision_is_no_worse_than_the_whole(dtype):
    """The gradient of the head's weight is rounded once, after it was summed in fp32."""
    x, weight, targets = hidden(rows=1200, dtype=dtype)
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(torch_sum(F.linear(*exact), targets) * 8 / 1200, exact)
    losses = (linear_cross_entropy_sum(x, weight, targets, 0.0, chunk)[0] for chunk in (None, 50))
    plain, chunked = (torch.autograd.grad(loss * 8 / 1200, (x, weight)) for loss in losses)
    for exactly, whole, parts in zip(expected, plain, chunked, strict=True):
        assert parts.dtype == dtype
        assert distance(parts.float(), exactly) < 1.3 * distance(whole.float(), exactly)


def test_by_chunks_a_sum_beyond_fp16_is_no_overflow():
    """8,192 times the same token: the gradient's sum is beyond 65,504, its mean is not."""
    x = torch.full((8192, 4), 16.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(65, 4, dtype=torch.float16, requires_grad=True)
    loss, _ = linear_cross_entropy_sum(x, weight, torch.zeros(8192, dtype=torch.long), 0.0, 512)
    (gradient,) = torch.autograd.grad(loss / 8192, weight)
    torch.testing.assert_close(gradient[0].float(), torch.full((4,), -16 * 64 / 65), rtol=1e-3, atol=0)


def test_a_second_backward_pass_is_an_error_and_not_twice_the_gradient():
    x, weight, targets = hidden()
    loss, _ = linear_cross_entropy_sum(x, weight, targets, 0.0, 7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Largest(TorchDispatchMode):
    """The most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            self.elements = max(self.elements, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize(("grad", "multiplications"), [(True, 3), (False, 1)])
def test_by_chunks_nothing_is_multiplied_twice(grad, multiplications):
    """Forward one, backward two, whatever the chunks; without gradients one."""
    for chunk_tokens in (None, 7):
        x, weight, targets = hidden()
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            loss, _ = linear_cross_entropy_sum(x, weight, targets, 0.0, chunk_tokens)
            if grad:
                loss.backward()
        assert counter.get_total_flops() == multiplications * 2 * 60 * 501 * 16


@pytest.mark.parametrize("grad", [True, False])
def test_by_chunks_no_tensor_is_as_large_as_all_logits(grad):
    x, weight, targets = hidden(rows=300)
    largest = {}
    for chunk_tokens in (None, 20):
        with torch.set_grad_enabled(grad), Largest() as seen:
            loss, _ = linear_cross_entropy_sum(x, weight, targets, 0.1, chunk_tokens)
            if grad:
                loss.backward()
        largest[chunk_tokens] = seen.elements
    assert largest == {None: 300 * 501, 20: 20 * 501}


def torch_log_probs(x, weight, targets):
    """Written out: the log-softmax of all logits, and of it the targets'."""
    chosen = F.log_softmax(F.linear(x, weight), dim=-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == IGNORE_INDEX, 0, chosen)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 59])
def test_log_probs_by_chunks_and_their_gradients_are_those_of_the_whole(chunk_tokens):
    x, weight, targets = hidden()
    factors = torch.randn(targets.shape)  # what comes from a loss differs from token to token
    found = linear_log_probs(x, weight, targets, chunk_tokens)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch_log_probs(*exact, targets)
    assert found.shape == targets.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    gradients = zip(torch.autograd.grad(found, (x, weight), factors), torch.autograd.grad(expected, exact, factors.double()), strict=True)
    assert max(distance(*pair) for pair in gradients) < 1e-6
    with torch.no_grad():
        assert torch.equal(linear_log_probs(x, weight, targets, chunk_tokens), found)


def test_log_probs_by_chunks_give_ignored_tokens_and_a_frozen_head_no_gradient():
    x, weight, targets = hidden()
    found = linear_log_probs(x, weight.detach(), targets, 7)
    assert found[targets == IGNORE_INDEX].eq(0).all() and found[targets != IGNORE_INDEX].lt(0).all()
    expected = torch.autograd.grad(linear_log_probs(x, weight, targets, 7).sum(), x)[0]
    found.sum().backward()
    assert torch.equal(x.grad, expected) and weight.grad is None
    assert torch.equal(x.grad.ne(0).any(dim=-1), targets != IGNORE_INDEX)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_by_chunks_in_half_precision_are_no_worse_than_the_whole(dtype):
    x, weight, targets = hidden(rows=1200, dtype=dtype)
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(torch_log_probs(*exact, targets).sum() / 150, exact)
    sums = (linear_log_probs(x, weight, targets, chunk).sum() / 150 for chunk in (None, 50))
    plain, chunked = (torch.autograd.grad(value, (x, weight)) for value in sums)
    for exactly, whole, parts in zip(expected, plain, chunked, strict=True):
        assert parts.dtype == dtype
        assert distance(parts.float(), exactly) < 1.3 * distance(whole.float(), exactly)


@pytest.mark.parametrize("grad", [True, False])
def test_log_probs_by_chunks_keep_no_tensor_as_large_as_all_logits(grad):
    """Nor do they add up: what autograd keeps is what it was given."""
    x, weight, targets = hidden(rows=300)
    largest, kept = {}, {}
    for chunk_tokens in (None, 20):
        saved = kept.setdefault(chunk_tokens, [])
        with torch.set_grad_enabled(grad), Largest() as seen:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
                found = linear_log_probs(x, weight, targets, chunk_tokens).sum()
            if grad:
                found.backward()
        largest[chunk_tokens] = seen.elements
    assert largest == {None: 300 * 501, 20: 20 * 501}
    assert max([*kept[20], 0]) == (weight.numel() if grad else 0)
    assert max([*kept[None], 0]) == (300 * 501 if grad else 0)
