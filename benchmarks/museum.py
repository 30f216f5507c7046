"""Every number of docs/bug_museum.md, measured again.

Run:  python benchmarks/museum.py              about 20 minutes on one CPU core
      python benchmarks/museum.py --tables     only write the table of the page anew

Results go to benchmarks/results/museum.json. The bugs themselves are in tests/test_bug_museum.py.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from common import Benchmark, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

from test_bug_museum import CURVES, LENGTH, MUSEUM, Exhibit, on_display  # noqa: E402

SEEDS = (1, 2, 3)


def sampled(exhibit: Exhibit, flags: str) -> list[float]:
    """Exact success (frozen lake) or mean return (CartPole) of the sampled policy, seed by seed."""
    script, found = importlib.import_module(exhibit.module), []
    for seed in SEEDS:
        with on_display(exhibit), tempfile.TemporaryDirectory() as folder:
            line = f"{flags} --seed {seed} --eval_every 0 --save_steps 0 --quiet --threads 1"
            try:
                args = script.parse_args([*line.split(), "--output_dir", folder])
                found.append(script.train(args)["sampled"])
            except FloatingPointError:
                found.append(math.nan)
    return found


def part_curves() -> list[dict]:
    """Runs with a published bug put in, and without it, 3 seeds."""
    rows, without = [], {}
    for exhibit in tqdm([e for e in MUSEUM if e.name in CURVES], desc="exhibits"):
        flags = f"{CURVES[exhibit.name]} {LENGTH[exhibit.module]}"
        key = exhibit.module, flags
        if key not in without:
            without[key] = sampled(replace(exhibit, edits=[]), flags)
        row = {"exhibit": exhibit.name, "script": exhibit.module, "flags": flags}
        rows.append(row | {"with": sampled(exhibit, flags), "without": without[key]})
    return rows


PARTS = {"curves": part_curves}


def table_museum(rows: list[dict]) -> str:
    """Means of the seeds, with (lowest-highest)."""
    body = []
    for row in rows:
        digits = 3 if row["script"].startswith("frozen") else 0
        shown = [
            f"{statistics.mean(v):.{digits}f} ({min(v):.{digits}f}-{max(v):.{digits}f})"
            for v in (row["with"], row["without"])
        ]
        body.append([row["exhibit"], *shown, f"`{row['flags']}`"])
    return table(["exhibit", "with the bug", "without", "flags"], body)


TABLES = {"museum": (["curves"], table_museum)}
BENCHMARK = Benchmark("museum", PARTS, TABLES, [])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
