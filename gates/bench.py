"""`python -m kernarc.gates.bench`: how long the intervals of one decision take."""

import platform
import time

import click
import numpy as np

from .intervals import depth_intervals


@click.command()
@click.option("--n-resamples", default=10_000, show_default=True)
@click.option("--depths", default=4, show_default=True)
@click.option("--launches", default=5, show_default=True)
@click.option("--requests", default=40, show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(n_resamples: int, depths: int, launches: int, requests: int, repeats: int) -> None:
    """Times the two-level bootstrap with both intervals; prints the slowest of the repeats (the first warms up)."""
    rng = np.random.default_rng(0)
    ratios = [[rng.normal(0, 0.02, requests) for _ in range(launches)] for _ in range(depths)]
    orders = [launch % 2 == 0 for launch in range(launches)]
    seconds = []
    for seed in range(repeats):
        start = time.perf_counter()
        depth_intervals(ratios, confidence=0.95, n_resamples=n_resamples, seed=seed, candidate_second=orders)
        seconds.append(time.perf_counter() - start)
    shape = f"{n_resamples:,} resamples x {depths} depths x {launches} launches x {requests} requests"
    click.echo(f"{shape}: slowest {max(seconds):.2f} s, fastest {min(seconds):.2f} s ({platform.processor() or 'cpu'})")


if __name__ == "__main__":
    main()
