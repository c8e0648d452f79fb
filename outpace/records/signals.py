"""Signals by which a user, a terminal or a scheduler asks a process to end."""

import signal

# How schedulers announce that a job's time is nearly up or that it is preempted: SLURM by the
# signal that --signal names (sbatch(1)), submitit by SIGUSR2, Grid Engine by any of these
# (queue_conf(5)). Each of them kills a process that does not handle it.
ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *ANNOUNCEMENTS)


def may_handle(number: signal.Signals) -> bool:
    """Return whether outpace may handle a signal that asks it to end. It may not if the parent
    ignores the signal (nohup, a background job), or if the user's code handles it (submitit's
    requeue).
    """
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        return False
    if number not in ANNOUNCEMENTS or not callable(handler):
        return True
    return getattr(handler, "__module__", "").startswith("outpace.")
