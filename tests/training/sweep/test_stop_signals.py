import os
import signal
import subprocess
import sys

from unisono.training.sweep.stop_signals import StopSignals

LONG = "import time\ntime.sleep(30)"


def test_a_signal_before_the_run_is_known_still_ends_it() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", LONG], process_group=0) as process:
            assert signals.wait(process) == 143
        assert signals.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)  # the process is gone; the first signal counts
        assert signals.received == signal.SIGTERM


def test_ignored_signals_stay_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)
