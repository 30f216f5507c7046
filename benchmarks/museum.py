"""Every number of docs/bug_museum.md, measured again.

Run:  python benchmarks/museum.py              about 10 minutes on one CPU core
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

from test_bug_museum import CG, CP, FL, MUSEUM, Exhibit, on_display  # noqa: E402

SEEDS = (1, 2, 3)
PPO, GRPO = "--adv_estimator ppo", "--adv_estimator grpo"
LENGTH = {  # of the runs that show a curve
    FL: "--max_steps 200",
    CP: "--max_steps 30000 --target_return 0",
    CG: "--max_steps 30000 --target_return 0",
}
CURVES = {  # exhibits whose runs differ from those without the bug, the flags that matter to them
    "masked when sampled, not when scored": PPO,
    "old log-probs taken again at each step": PPO,
    "minimum taken before the advantage": PPO,
    "maximum of the objectives": PPO,
    "clip range begins at 1 + epsilon": PPO,
    "lower and upper epsilon swapped": PPO + " --clip_epsilon_high 0.4",
    "ratio times the mean advantage": PPO,
    "product for geometric mean in the sequence ratio": GRPO
    + " --importance_sampling_level sequence",
    "k1 in the loss": GRPO + " --beta 0.04",
    "entropy with the wrong sign": PPO + " --entropy_coef 0.01",
    "entropy of the sampled actions only": PPO + " --entropy_coef 0.01",
    "standard deviation with ddof 0": GRPO,
    "flat group divided by its rounding": GRPO + " --gamma 0.99",
    "mean of the batch for the group's": GRPO,
    "episodes of other prompts in the group": GRPO,
    "advantages laid out along the wrong axis": GRPO,
    "GAE cut one step off": PPO,
    "GAE adds its own zero": PPO,
    "reward on an extra row after the end": PPO,
    "whitened inside each trajectory": PPO,
    "whitened without the parentheses": PPO,
    "whitened advantages in the critic's target": PPO,
    "critic's target is its own value": PPO,
    "padding with a gradient": PPO + " --entropy_coef 0.01",
    "masked after exp: 0 * inf": PPO,
    "mean over each episode's length": GRPO,
    "gradient clipped before backward": PPO,
    "out of time treated as death": PPO,
    "GAE not cut at an episode's end": PPO,
    "GAE not cut at the time limit": PPO,
    "autoreset's row trained on": PPO,
    "trajectory mean as the baseline": "--adv_estimator baseline",
    "a column against a row": PPO,
    "sampled at a temperature, scored without it": GRPO,
    "one member's reward for all": GRPO,
    "time limit forgotten in a branch": GRPO,
    "members of a group start apart": GRPO,
}


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
