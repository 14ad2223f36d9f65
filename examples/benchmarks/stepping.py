"""What raysgd's loop costs for each batch: only it and the hand-written loop, in epochs of some seconds.

The same measurement as throughput.py's, which has all peers, and therefore fewer rounds and short epochs. What a call costs
(a snapshot, the results of all workers) has here the weight that it has in the shortest of real epochs. And everything is
started several times: of the same program, one process is faster than another for as long as it lives, by where its
memory happens to lie.

    python examples/benchmarks/stepping.py
"""

import argparse
from typing import Any

from contenders import BASE, Collating, RaySGD, Seeded, cluster
from report import claim_stdout, emit
from throughput import COLUMNS, measure
from workloads import WORKLOADS, Setting

CONTENDERS = (BASE, RaySGD.name, Collating.name, Seeded.name)
LONGER = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--starts", type=int, default=6, help="how often everything is started")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each start")
    parser.add_argument("--steps", type=int, help="batches per worker and epoch (default: three times the workload's)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of one workload, only to see that it runs")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.workloads, args.starts, args.steps = ["tiny"], 2, 3

    rows: list[dict[str, Any]] = []
    with cluster(len(CONTENDERS) * args.workers):
        for name in args.workloads:
            workload = WORKLOADS[name]
            setting = Setting(workload.shortened(args.steps or LONGER * workload.steps), args.workers)
            rows += measure(setting, CONTENDERS, args.rounds, starts=args.starts)
    emit(out, "stepping", vars(args), rows, COLUMNS[:-1])


if __name__ == "__main__":
    main()
