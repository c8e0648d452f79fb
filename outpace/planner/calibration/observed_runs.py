"""Correction of a machine's rates with logged runs of any trainer."""

from collections.abc import Sequence
from dataclasses import replace

from outpace.planner.calibration.cluster import Cluster
from outpace.planner.calibration.fit_rates import RateFit, SeenStep, calibrate
from outpace.records.training_log import ObservedRun
from outpace.records.units import show_share


def correct_cluster(cluster: Cluster, runs: Sequence[ObservedRun]) -> Cluster:
    """Return the machine with the rates that best predict the steps of `runs`.

    Each rate has one correction factor for any number of ranks. The factors also absorb differences
    between the trainer and the planner's assumptions. The prediction interval does not change: a
    few runs do not show how large the errors of other runs are.
    """
    seen = [
        SeenStep(run.outline, run.seq_len, run.global_batch, run.plan, run.step_time_s)
        for run in runs
    ]
    rates = RateFit(cluster.device, cluster.fabric)
    worlds = {run.plan.world_size for run in runs}
    found = calibrate(dict.fromkeys(worlds, rates), seen)
    corrected = found.rates[runs[0].plan.world_size]
    trainers = ", ".join(sorted({run.trainer for run in runs}))
    plural = "" if len(runs) == 1 else "s"
    note = (
        f"its rates are corrected by {len(runs)} logged run{plural} ({trainers}), with a "
        f"median error of {show_share(found.off)} after the correction"
    )
    return replace(
        cluster, device=corrected.device, fabric=corrected.fabric, notes=(*cluster.notes, note)
    )
