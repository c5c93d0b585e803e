"""Records brokers under load and loses their power many times: `python -m tests.power_loss.run --losses 10000`.

Each trace is of another run, for some of the losses. A trace with breaches is kept, and the command that repeats them
is printed.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.power_loss import simulate
from tests.power_loss.record import record
from tests.power_loss.simulate import Plan, Report
from tests.power_loss.trace import SHIM
from tests.shims import NoCompiler, make_shim

LOSSES_OF_A_TRACE = 1000
RECORD_S = 8.0
NAMED = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.power_loss.run", description=__doc__)
    parser.add_argument("--losses", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="chooses load, moments and images (default: a new one)")
    parser.add_argument("--again", type=float, default=0.05, help="share of losses with more during the recovery")
    parser.add_argument("--seconds", type=float, default=RECORD_S, help="length of each recording")
    parser.add_argument("--losses-of-a-trace", type=int, default=LOSSES_OF_A_TRACE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, default=Path(), help="where a directory with a bad trace is made")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    total = Report()
    with tempfile.TemporaryDirectory(prefix="peeklock-power-loss-") as name:
        folder = Path(name)
        try:
            shim = make_shim(SHIM, folder)
        except NoCompiler as error:
            print(f"cannot run: {error}", file=sys.stderr)
            return 2
        number = 0
        while total.losses < options.losses:
            recorded = folder / f"trace-{number}"
            record(recorded, shim, seconds=options.seconds, seed=seed + number)
            losses = min(options.losses_of_a_trace, options.losses - total.losses)
            plan = Plan(losses, seed + number, options.jobs, options.again)
            report = simulate.run(recorded, shim, plan)
            print(f"trace {number}: {report}", flush=True)
            if report.breaches:
                _keep(recorded, shim, options.keep / f"power-loss-{seed + number}", plan, report)
            total.add(report)
            shutil.rmtree(recorded, ignore_errors=True)
            number += 1
    print(f"all: {total}")
    return 1 if total.breaches else 0


def _keep(recorded: Path, shim: Path, kept: Path, plan: Plan, report: Report) -> None:
    kept = kept.absolute()
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(recorded, kept, ignore=shutil.ignore_patterns("*.sock"))
    shutil.copy(shim, kept)
    for loss, text in report.breaches[:NAMED]:
        print(f"  loss {loss}: {text}")
    loss, _ = report.breaches[0]
    library = kept / shim.name
    print(
        f"  repeat: LD_PRELOAD={library} python -m tests.power_loss.simulate {kept} --shim {library} "
        f"--losses {plan.losses} --seed {plan.seed} --again {plan.again} --only {loss}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
