"""What the gate's own rule does under known noise: coverage, false alarms, power. What is simulated is what decides."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from ..bootstrap import Counts, Floats, resampling_weights
from ..crossover import LaunchDesign
from ..intervals import half_widths
from .noise import DESIGN_NOISE, NOISES, Noise

COVERAGE_LAUNCHES = (3, 5, 8, 12, 20)
POWER_EFFECTS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)
START_ORDERS = (0.0, -0.02, -0.05)  # how much slower the engine started second is, a fraction
CHUNK = 250  # comparisons held in memory at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class GateRule:
    """The part of a gate's configuration that a simulation needs. confidence is for all looks together.

    is_crossover: start order is taken out, as in every gate whose engines we start.
    """

    depths: int = 4
    requests: int = 20
    margin: float = 0.01
    confidence: float = 0.95
    looks: tuple[int, ...] = (5, 8, 12)
    n_resamples: int = 2_000
    is_crossover: bool = True

    def design(self, launches: int) -> LaunchDesign:
        """Of the first launches of a comparison."""
        return LaunchDesign.alternating(launches) if self.is_crossover else LaunchDesign.plain(launches)

    @property
    def confidence_of_a_look(self) -> float:
        """The error is split evenly over the looks."""
        return 1 - (1 - self.confidence) / len(self.looks)


@dataclass(frozen=True)
class Coverage:
    """Share of comparisons whose simultaneous intervals hold every depth's true effect."""

    noise: str
    launches: int
    requests: int
    comparisons: int
    bootstrap: float
    student: float
    deciding: float


@dataclass(frozen=True)
class Decisions:
    """What the whole rule, looks included, says where the true effect of every depth is `effect` (a fraction)."""

    noise: str
    effect: float
    comparisons: int
    failed: float
    passed: float
    mean_launches: float


@dataclass(frozen=True)
class Simulation:
    """One full run: the tables that `calibrate --simulate` prints.

    design_coverage: the plain formulas. start_order: a 3 % slowdown under each of START_ORDERS, by the rule and by the
    plain formulas.
    """

    rule: GateRule
    design_coverage: tuple[Coverage, ...]
    coverage: tuple[Coverage, ...]
    no_effect: tuple[Decisions, ...]
    at_margin: tuple[Decisions, ...]
    power: tuple[Decisions, ...]
    start_order: tuple[tuple[Decisions, Decisions], ...]


def simulate(
    rule: GateRule, comparisons: int, seed: int, progress: Progress, noises: Sequence[Noise] = NOISES
) -> Simulation:
    """All tables, on every core. Deterministic for a seed, whatever the number of cores."""
    plain = replace(rule, is_crossover=False)
    one_launch = (DESIGN_NOISE, replace(plain, requests=40), 1)
    design = [
        (DESIGN_NOISE, replace(plain, requests=requests), launches)
        for requests in (20, 40)
        for launches in COVERAGE_LAUNCHES
    ]
    settings = [(noise, rule, launches) for noise in noises for launches in COVERAGE_LAUNCHES]
    effects = [(noise, effect) for effect in (0.0, rule.margin) for noise in noises]
    effects += [(DESIGN_NOISE, effect) for effect in POWER_EFFECTS]
    coverage_jobs = [one_launch, *design, *settings]
    jobs: list[Callable[[int], Coverage | Decisions]] = [_CoverageJob(*job, comparisons) for job in coverage_jobs]
    jobs += [_DecisionJob(noise, rule, effect, comparisons) for noise, effect in effects]
    moved = [replace(DESIGN_NOISE, order=math.log1p(order)) for order in START_ORDERS]
    jobs += [_DecisionJob(noise, by, 0.03, comparisons) for by in (rule, plain) for noise in moved]
    results = list(_run(jobs, seed, progress))
    coverage = [result for result in results if isinstance(result, Coverage)]
    decisions = [result for result in results if isinstance(result, Decisions)]
    first = 1 + len(design)
    ordered = decisions[-2 * len(moved) :]
    return Simulation(
        rule=rule,
        design_coverage=tuple(coverage[:first]),
        coverage=tuple(coverage[first:]),
        no_effect=tuple(decisions[: len(noises)]),
        at_margin=tuple(decisions[len(noises) : 2 * len(noises)]),
        power=tuple(decisions[2 * len(noises) : -2 * len(moved)]),
        start_order=tuple(zip(ordered[: len(moved)], ordered[len(moved) :], strict=True)),
    )


def simulate_noise(
    noise: Noise, rule: GateRule, comparisons: int, seed: int, progress: Progress
) -> tuple[tuple[Decisions, ...], tuple[Coverage, ...]]:
    """The power curve under one noise, and coverage at every look, on every core."""
    jobs: list[Callable[[int], Coverage | Decisions]] = []
    jobs += [_DecisionJob(noise, rule, effect, comparisons) for effect in POWER_EFFECTS]
    jobs += [_CoverageJob(noise, rule, look, comparisons) for look in rule.looks]
    results = _run(jobs, seed, progress)
    decisions = tuple(result for result in results if isinstance(result, Decisions))
    return decisions, tuple(result for result in results if isinstance(result, Coverage))


def simulate_coverage(noise: Noise, rule: GateRule, launches: int, comparisons: int, seed: int) -> Coverage:
    """How often the intervals of so many launches hold the truth at every depth, at rule.confidence in one look."""
    held = np.zeros(3, dtype=np.int64)
    for pairs in _chunks(noise, rule, launches, comparisons, seed):
        estimates, bootstrap, student = _half_widths(pairs, launches, rule, rule.confidence)
        # One launch has no Student interval: what decides is undefined there, and holds nothing.
        for index, width in enumerate((bootstrap, student, np.maximum(bootstrap, student))):
            held[index] += int((np.abs(estimates) <= width).all(axis=1).sum())
    bootstrap_share, student_share, deciding_share = (held / comparisons).tolist()
    return Coverage(noise.name, launches, rule.requests, comparisons, bootstrap_share, student_share, deciding_share)


def simulate_decisions(noise: Noise, rule: GateRule, effect: float, comparisons: int, seed: int) -> Decisions:
    """How often the rule FAILs and PASSes with `effect` at every depth, and how many launches it takes."""
    failed = passed = launches_used = 0
    for pairs in _chunks(noise, rule, rule.looks[-1], comparisons, seed):
        look_failed, look_passed, used = _decide(pairs + math.log1p(effect), rule)
        failed += int(look_failed.sum())
        passed += int(look_passed.sum())
        launches_used += int(used.sum())
    return Decisions(
        noise.name, effect, comparisons, failed / comparisons, passed / comparisons, launches_used / comparisons
    )


def _decide(pairs: Floats, rule: GateRule) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """(failed, passed, launches used) of each comparison; pairs [C, D, launch limit, R]."""
    count = len(pairs)
    failed, passed = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    used = np.zeros(count, dtype=np.int64)
    limit = math.log1p(rule.margin)
    for launches in rule.looks:
        undecided = ~(failed | passed)
        estimates, bootstrap, student = _half_widths(pairs[:, :, :launches], launches, rule, rule.confidence_of_a_look)
        width = np.maximum(bootstrap, student)
        failed |= undecided & (estimates - width > limit).any(axis=1)
        passed |= undecided & ~failed & (estimates + width < limit).all(axis=1)
        used[undecided] = launches
    return failed, passed, used


def _half_widths(pairs: Floats, launches: int, rule: GateRule, confidence: float) -> tuple[Floats, Floats, Floats]:
    counts, weights = _weights(pairs.shape[1], launches, pairs.shape[3], rule)
    return half_widths(pairs.reshape(*pairs.shape[:2], -1), counts, weights, confidence, rule.design(launches))


@cache
def _weights(depths: int, launches: int, requests: int, rule: GateRule) -> tuple[Counts, Floats]:
    """The same resamples for every comparison: they do not depend on the data."""
    counts = np.full((depths, launches), requests, dtype=np.int64)
    strata = rule.design(launches).strata
    return counts, resampling_weights(counts, requests, rule.n_resamples, launches, strata)


def _chunks(noise: Noise, rule: GateRule, launches: int, comparisons: int, seed: int) -> Iterator[Floats]:
    rng = np.random.default_rng(seed)
    for start in range(0, comparisons, CHUNK):
        yield noise.draw(rng, min(CHUNK, comparisons - start), rule.depths, launches, rule.requests)


@dataclass(frozen=True)
class _CoverageJob:
    noise: Noise
    rule: GateRule
    launches: int
    comparisons: int

    def __call__(self, seed: int) -> Coverage:
        return simulate_coverage(self.noise, self.rule, self.launches, self.comparisons, seed)


@dataclass(frozen=True)
class _DecisionJob:
    noise: Noise
    rule: GateRule
    effect: float
    comparisons: int

    def __call__(self, seed: int) -> Decisions:
        return simulate_decisions(self.noise, self.rule, self.effect, self.comparisons, seed)


def _run(
    jobs: Sequence[Callable[[int], Coverage | Decisions]], seed: int, progress: Progress
) -> list[Coverage | Decisions]:
    """The jobs' results in their order; each job has a seed of its own."""
    seeds = [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(len(jobs))]
    results: dict[int, Coverage | Decisions] = {}
    # Fresh interpreters: forking one that has threads (as torch does) can hang.
    with ProcessPoolExecutor(max_workers=os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(job, seeds[index]): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            progress(len(results), len(jobs))
    return [results[index] for index in range(len(jobs))]
