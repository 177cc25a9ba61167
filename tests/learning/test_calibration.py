"""Expected calibration error: by hand, bin by bin, and what it is for a model that is right as often as it is sure."""

import numpy as np
import pytest
import torch

from ds_gpt.learning.calibration import confidence_bins, expected_calibration_error
from ds_gpt.learning.loss import IGNORE_INDEX


def test_by_hand() -> None:
    """Five tokens in three of ten bins: two at 0.75 of which one is right, two at 0.95, both right, one at 0.55, wrong."""
    confidences, right = [0.75, 0.75, 0.95, 0.95, 0.55], [1, 0, 1, 1, 0]
    logits = torch.tensor([[p, 1 - p] for p in confidences]).log()
    targets = torch.tensor([0 if hit else 1 for hit in right])
    sums = confidence_bins(logits, targets, bins=10)
    assert sums[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 2, 0, 2] and sums[2].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 2]
    expected = (2 * abs(0.5 - 0.75) + 2 * abs(1.0 - 0.95) + 1 * abs(0.0 - 0.55)) / 5
    assert expected_calibration_error(sums) == pytest.approx(expected, abs=1e-6)


def test_bin_by_bin() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 250, 7, generator=generator) * 2, torch.randint(7, (4, 250), generator=generator)
    targets[0, :100] = IGNORE_INDEX
    probabilities = np.exp(logits.double().numpy().reshape(-1, 7))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    confidence, hit = probabilities.max(axis=1), probabilities.argmax(axis=1) == targets.numpy().ravel()
    counted, expected = targets.numpy().ravel() != IGNORE_INDEX, 0.0
    for m in range(1, 16):
        inside = counted & (confidence > (m - 1) / 15) & (confidence <= m / 15)
        if inside.any():
            expected += inside.sum() / counted.sum() * abs(hit[inside].mean() - confidence[inside].mean())
    sums = confidence_bins(logits, targets)
    assert expected_calibration_error(sums) == pytest.approx(expected, abs=1e-6)
    halves = confidence_bins(logits[:2], targets[:2]) + confidence_bins(logits[2:], targets[2:])
    torch.testing.assert_close(halves, sums)


def test_who_draws_from_its_own_distribution_is_calibrated() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(100_000, 5, generator=generator) * 2
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    honest, boastful = (
        expected_calibration_error(confidence_bins(logits * sharpness, targets)) for sharpness in (1, 3)
    )
    assert honest < 0.01 < 0.1 < boastful


def test_the_ends_of_the_scale_have_a_bin() -> None:
    sums = confidence_bins(torch.tensor([[1e4, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]), bins=2)
    assert sums[0].tolist() == [1, 1]
