"""Free keys beside honest nodes: attack kinds × keys × honest nodes, as ratios to the undisturbed run in the same call.

- `leases`: updates in a second while keys hoard leases, at least 0.9 of those without them.
- `broadcast`, where it is there: how long a version takes to the honest nodes while keys hold up its way.
- ARGS choose: `--halves leases --honest 1 4 --kinds new-20 --addresses one --rounds 3`.
"""

import argparse
import importlib
import importlib.util
import sys

from bench.harness import Bench, quick_from_environment
from bench.strangers.cells import ADDRESSES, HONEST

HALVES = ("leases", "broadcast")
"""Modules of this package. Each has `KINDS` of attacks by name, and `rows(options, quick=…)`, which gives a `Row` for
each cell as it ends; `options.kinds` names those to play, of all halves, or none: then the half chooses."""


def present() -> list[str]:
    """The halves that are there."""
    return [name for name in HALVES if importlib.util.find_spec(f"bench.strangers.{name}")]


def arguments() -> argparse.Namespace:
    """The options; QUICK=1 makes the choice small."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench strangers", description=__doc__)
    parser.add_argument("--halves", nargs="*", choices=present(), default=present())
    parser.add_argument("--honest", nargs="*", type=int, default=[1] if quick else list(HONEST))
    kinds = sorted({kind for half in present() for kind in importlib.import_module(f"bench.strangers.{half}").KINDS})
    parser.add_argument("--kinds", nargs="*", choices=kinds, default=[])
    parser.add_argument("--addresses", nargs="*", choices=ADDRESSES, default=["one"] if quick else list(ADDRESSES))
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Play every chosen cell, and judge."""
    options = arguments()
    bench = Bench("strangers", inputs=vars(options))
    bounds = dict[str, tuple[float | None, float | None]]()
    for half in options.halves:
        for row in importlib.import_module(f"bench.strangers.{half}").rows(options, quick=bench.quick):
            print(f"{row.case}: {row.undisturbed:.3f} undisturbed, {row.attacked:.3f} attacked {row.unit}", flush=True)
            bench.measure(f"{row.case}, undisturbed", row.undisturbed, unit=row.unit)
            bench.measure(f"{row.case}, attacked", row.attacked, unit=row.unit)
            bounds[row.case] = row.at_least, row.at_most
    for case, (at_least, at_most) in bounds.items():
        ratio = bench.ratio(f"{case}, ratio", f"{case}, attacked", f"{case}, undisturbed")
        bench.goal(case, ratio, at_least=at_least, at_most=at_most)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
