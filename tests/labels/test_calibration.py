"""Calibration and shares: twins written with loops, scipy as an independent reference, properties."""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import given, strategies as st

from tag2box.labels.calibration import (
    CALIBRATION_KINDS,
    Calibration,
    calibration_error,
    choose_calibration,
    expected_threshold,
    fit_beta,
    fit_calibration,
    isotonic_regression,
    logistic_loss,
    precision_curve,
    precision_threshold,
    reliability,
    shifted,
)
from tag2box.labels.shares import Estimate, beta_cumulative, binomial_interval, effective_trials, trials_until

shares = st.floats(0, 1, width=32)
labels = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.8, 1.0]), st.booleans()), max_size=25)


def tensors(rows: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    return scores, torch.tensor([right for _, right in rows], dtype=torch.bool)


def simulated(count: int, seed: int, power: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and labels that are right with probability score ** power."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    return scores, torch.rand(count, generator=generator, dtype=torch.float64) < scores**power


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(("hits", "count"), [(0, 0), (0, 1), (1, 1), (0, 10), (10, 10), (3, 10), (95, 100), (500, 999)])
def test_the_interval_is_that_of_clopper_and_pearson(hits: int, count: int) -> None:
    found = binomial_interval(hits, count)
    if not count:
        assert found == (0, 1)
        return
    wanted = scipy.stats.binomtest(hits, count).proportion_ci(method="exact")
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@given(st.floats(0, 1), st.floats(0.1, 400), st.floats(0.1, 400))
def test_the_incomplete_beta_function(x: float, a: float, b: float) -> None:
    assert beta_cumulative(x, a, b) == pytest.approx(scipy.special.betainc(a, b, x), abs=1e-9)


@given(st.integers(0, 40), st.integers(0, 40))
def test_intervals_hold_the_share_and_mirror(right: int, wrong: int) -> None:
    low, high = binomial_interval(right, right + wrong)
    assert 0 <= low <= (right / (right + wrong) if right + wrong else 0.5) <= high <= 1
    assert binomial_interval(wrong, right + wrong) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@pytest.mark.parametrize(
    ("right", "total", "expected"),
    [
        ((), (), 0),
        ((0,), (0,), 0),
        ((1,), (3,), 1),  # one photo says as much as one label
        ((3, 3), (3, 3), 2),  # all right: the variance is unknown
        ((1, 0, 1, 0), (1, 1, 1, 1), 4),  # a label per photo: independent
        ((5, 0, 5, 0), (5, 5, 5, 5), 4),  # photos all right or all wrong
        ((1, 1, 1, 1), (2, 2, 2, 2), 8),  # no variance between photos
    ],
)
def test_labels_of_one_photo_are_not_independent(right, total, expected) -> None:
    assert effective_trials(right, total) == pytest.approx(expected)


@given(st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=12))
def test_effective_trials_lie_between_photos_and_labels(rows) -> None:
    right, total = [r for r, _ in rows], [n for _, n in rows]
    assert sum(n > 0 for n in total) <= effective_trials(right, total) <= sum(total)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.69, 0.8, 1.0])
def test_the_number_of_trials_is_the_first_that_is_enough(share: float) -> None:
    def narrow(own) -> bool:
        return own.high - own.low <= 0.2

    found = trials_until(share, narrow)
    loop = next(n for n in itertools.count(1) if narrow(binomial_interval(share * n, n)))
    assert found == loop
    assert trials_until(0.6, lambda own: own.low >= 0.7) is None


def test_an_estimate_without_anything() -> None:
    assert Estimate().share is None and Estimate().interval == (0, 1)


# ---------------------------------------------------------------- isotonic regression


def isotonic_twin(values: list[float], weights: list[float]) -> list[float]:
    """The minimax formula of isotonic regression: max over starts of min over ends of the mean between them."""

    def mean(a: int, b: int) -> float:
        return sum(v * w for v, w in zip(values[a : b + 1], weights[a : b + 1], strict=True)) / sum(weights[a : b + 1])

    return [
        max(min(mean(a, b) for b in range(at, len(values))) for a in range(at + 1)) for at in range(len(values))
    ]  # fmt: skip


@pytest.mark.parametrize("values", [[], [1.0], [0.2, 0.1], [3, 2, 1], [1, 2, 3], [1, 0, 1, 0, 1]])
def test_isotonic_cases(values: list[float]) -> None:
    assert isotonic_regression(values, [1.0] * len(values)) == pytest.approx(isotonic_twin(values, [1.0] * len(values)))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), max_size=14))
def test_isotonic_regression_is_that_of_the_twin_and_of_scipy(rows) -> None:
    values, weights = [v for v, _ in rows], [w for _, w in rows]
    found = isotonic_regression(values, weights)
    assert found == sorted(found)
    assert found == pytest.approx(isotonic_twin(values, weights), abs=1e-9)
    if rows:
        assert found == pytest.approx(list(scipy.optimize.isotonic_regression(values, weights=weights).x), abs=1e-9)


# ---------------------------------------------------------------- beta calibration


def beta_twin(scores: list[float], right: list[bool]) -> tuple[list[float], float]:
    """The same optimum by scipy's bounded minimizer, with the loss written out."""
    positive, negative = sum(right), len(right) - sum(right)

    def loss(weights) -> float:
        total = 0.0005 * sum(w * w for w in weights)
        for score, is_right in zip(scores, right, strict=True):
            inside = min(max(score, 1e-6), 1 - 1e-6)
            logit = weights[0] * math.log(inside) - weights[1] * math.log(1 - inside) + weights[2]
            target = (positive + 1) / (positive + 2) if is_right else 1 / (negative + 2)
            total += math.log1p(math.exp(-abs(logit))) + max(logit, 0) - target * logit
        return total

    bounds = [(0, None), (0, None), (None, None)]
    found = scipy.optimize.minimize(loss, [0.5, 0.5, 0.0], bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-14})
    return list(found.x), float(found.fun)


@pytest.mark.parametrize(
    "rows",
    [
        [(0.5, True)],
        [(0.2, True), (0.8, False)],  # the wrong way round: slopes of zero
        [(0.1, False), (0.2, False), (0.8, True), (0.9, True)],  # separated
        [(0.3, True), (0.3, False)],
        [(0.0, False), (1.0, True), (0.5, True)],
    ],
)
def test_beta_cases_reach_the_twins_loss(rows) -> None:
    scores, right = tensors(rows)
    a, b, c = fit_beta(scores, right)
    assert a >= 0 and b >= 0
    assert _loss_of(scores, right, (a, b, c)) <= beta_twin(scores.tolist(), right.tolist())[1] + 1e-5


def _loss_of(scores, right, weights) -> float:
    positive, negative = int(right.sum()), int((~right).sum())
    targets = torch.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2)).double()
    inside = scores.clamp(1e-6, 1 - 1e-6)
    columns = torch.stack([inside.log(), -(1 - inside).log(), torch.ones_like(inside)], 1)
    return logistic_loss(columns, targets, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(4))
def test_beta_of_random_labels_is_that_of_the_twin(seed: int) -> None:
    scores, right = simulated(60, seed)
    found = fit_beta(scores, right)
    wanted, loss = beta_twin(scores.tolist(), right.tolist())
    assert _loss_of(scores, right, found) <= loss + 1e-6
    mapped = Calibration("beta", slopes=found)(scores)
    assert mapped.tolist() == pytest.approx(Calibration("beta", slopes=tuple(wanted))(scores).tolist(), abs=2e-3)


def test_beta_calibration_recovers_the_truth() -> None:
    scores, right = simulated(4000, 1, power=3.0)
    mapped = fit_calibration("beta", scores, right)(scores)
    assert float((mapped - scores**3).abs().mean()) < 0.02


# ---------------------------------------------------------------- mappings


@given(labels, st.sampled_from(CALIBRATION_KINDS), st.lists(shares, max_size=8))
def test_mappings_are_monotone_probabilities(rows, kind, given_scores) -> None:
    own = fit_calibration(kind, *tensors(rows))
    ordered = torch.tensor(sorted(given_scores), dtype=torch.float64)
    found = own(ordered)
    assert bool(((found >= 0) & (found <= 1)).all()) and bool((found.diff() >= -1e-12).all())
    assert found.tolist() == pytest.approx([own.one(score) for score in ordered.tolist()])


def test_below_the_lowest_reviewed_score_the_probability_falls_to_zero() -> None:
    own = fit_calibration("constant", *tensors([(0.4, True), (0.9, True), (0.8, False)]))
    assert own.one(0.4) == own.one(1.0) == pytest.approx(2.5 / 4)
    assert own.one(0.2) == pytest.approx(own.one(0.4) / 2) and own.one(0.0) == 0


@pytest.mark.parametrize("wrong", [{"kind": "isotonic"}, {"knots": ((0.5, 0.5), (0.4, 0.6))}, {"shift": math.nan}])
def test_a_mapping_that_is_none_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="expected"):
        Calibration(**wrong)


def test_few_labels_get_a_constant_and_many_what_predicts_held_out_ones_best() -> None:
    assert choose_calibration(*tensors([])).calibration == Calibration()
    few = choose_calibration(*simulated(12, 0))
    assert few.calibration.kind == "constant" and not few.losses
    scores, right = simulated(300, 0, power=3.0)
    many = choose_calibration(scores, right)
    assert many.calibration.kind in {"beta", "isotonic"} and set(many.losses) == set(CALIBRATION_KINDS)
    assert many.losses[many.calibration.kind] < many.losses["raw"]
    assert choose_calibration(scores, right) == many  # seeded
    calibrated = choose_calibration(*simulated(3000, 3, power=1.0))
    assert calibrated.losses["raw"] <= min(calibrated.losses.values()) + 1e-3
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(300, generator=generator) < 0.3
    assert choose_calibration(scores, noise).losses["constant"] < choose_calibration(scores, noise).losses["raw"] - 0.05


@given(labels.filter(bool), st.floats(0.05, 0.95))
def test_a_shift_moves_the_mean_and_keeps_the_order(rows, mean) -> None:
    scores = tensors(rows)[0].clamp(0.1, 0.9)
    moved = shifted(Calibration(), scores, mean)
    assert float(moved(scores).mean()) == pytest.approx(mean, abs=1e-6)
    assert bool((moved(scores.sort().values).diff() >= 0).all())


# ---------------------------------------------------------------- quality and thresholds


def error_twin(probs: list[float], right: list[bool], bins: int) -> float:
    """Bins are filled one after the other; a run of equal values is never divided."""
    order = sorted(range(len(probs)), key=lambda row: probs[row])
    total, start = 0.0, 0
    while start < len(order):
        edge = next(n for n in range(start + 1, len(order) + 1)
                    if n == len(order) or n * bins // len(order) > start * bins // len(order))  # fmt: skip
        while edge < len(order) and probs[order[edge]] == probs[order[edge - 1]]:
            edge += 1
        rows = order[start:edge]
        total += abs(sum(right[row] for row in rows) - sum(probs[row] for row in rows))
        start = edge
    return total / len(probs) if probs else 0.0


@given(labels, st.integers(1, 6))
def test_the_calibration_error_is_that_of_the_twin_whatever_the_order(rows, bins) -> None:
    scores, right = tensors(rows)
    found = calibration_error(scores, right, bins)
    assert found == pytest.approx(error_twin(scores.tolist(), right.tolist(), bins))
    assert calibration_error(scores.flip(0), right.flip(0), bins) == pytest.approx(found)
    assert sum(own.count for own in reliability(scores, right, bins)) == len(rows)


@pytest.mark.parametrize(
    ("probs", "right", "expected"),
    [([], [], 0), ([0.5, 0.5], [True, False], 0), ([1.0, 1.0], [False, False], 1), ([0.0, 1.0], [False, True], 0)],
)
def test_calibration_error_cases(probs, right, expected) -> None:
    assert calibration_error(torch.tensor(probs), torch.tensor(right, dtype=torch.bool)) == pytest.approx(expected)


def threshold_twin(rows: list[tuple[float, bool]], wanted: float, least: int, by: str) -> float | None:
    for score in sorted({score for score, _ in rows}):
        above = [right for own, right in rows if own >= score]
        low = sum(above) / len(above) if by == "estimate" else binomial_interval(sum(above), len(above)).low
        if len(above) >= least and low >= wanted:
            return score
    return None


@given(
    labels, st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]), st.integers(1, 8), st.sampled_from(["estimate", "lower bound"])
)
def test_the_threshold_is_that_of_the_twin(rows, wanted, least, by) -> None:
    scores, right = tensors(rows)
    assert precision_threshold(scores, right, wanted, least=least, by=by) == threshold_twin(rows, wanted, least, by)
    curve = precision_curve(scores, right)
    assert [point.score for point in curve] == sorted({score for score, _ in rows}, reverse=True)
    assert not rows or (curve[-1].labels, curve[-1].right) == (len(rows), int(right.sum()))


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.4, 0.7, 0.9]), shares), max_size=12), st.sampled_from([0.2, 0.5, 0.9])
)
def test_the_expected_threshold_is_that_of_the_twin(rows, wanted) -> None:
    scores, probs = (torch.tensor([row[at] for row in rows], dtype=torch.float64) for at in (0, 1))
    means = {
        score: sum(p for s, p in rows if s >= score) / sum(s >= score for s, _ in rows)
        for score in {s for s, _ in rows}
    }
    reached = [score for score, mean in means.items() if mean >= wanted + 1e-9]
    found = expected_threshold(scores, probs, wanted)
    assert found == min(reached, default=None) or any(abs(mean - wanted) < 1e-8 for mean in means.values())
