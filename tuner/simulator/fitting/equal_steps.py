"""The differences between the times of steps with equal work: the noise of the machine, not an error of a step law."""

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

Array = npt.NDArray[np.float64]
NEIGHBOURS, FEWEST, SEARCHED = 15, 5, 80
# Equal steps differ by less than this factor in their work.
FACTOR = 2.0
# Steps that are nearer in time share a disturbance.
APART = 20


def spread_of_equal_steps(work: Array, wall_ns: Array, predicted_ns: Array) -> float:
    """Median relative error of a step predicted from other steps of about equal work; 0 if too few have such steps.

    work: [steps, columns], in the order of time. The prediction is the median of the nearest steps in work, relative to
    the times of the law: neither a difference in work nor a common error of equal steps counts.
    """
    if len(work) <= FEWEST:
        return 0.0
    positions = np.log2(work + 1)
    found, places = cKDTree(positions).query(positions, k=min(SEARCHED, len(work)))
    near = (found < np.log2(FACTOR)) & (np.abs(places - np.arange(len(work))[:, None]) > APART)
    ratios = wall_ns / np.maximum(predicted_ns, 1.0)
    errors = [
        abs(np.median(ratios[places[step][near[step]][:NEIGHBOURS]]) / ratios[step] - 1)
        for step in range(len(work))
        if near[step].sum() >= FEWEST
    ]
    return float(np.median(errors)) if len(errors) >= len(work) / 2 else 0.0
