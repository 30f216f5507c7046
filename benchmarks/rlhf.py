"""Every number of docs/tiny_gpt_rlhf.md, measured again.

Run:  python benchmarks/rlhf.py              all parts, about 30 minutes on one CPU core
      python benchmarks/rlhf.py beta         only these; the other parts' results stay
      python benchmarks/rlhf.py --tables     only write the tables of docs anew

Results go to benchmarks/results/rlhf.json, tables to the page and README (between their
`<!-- table NAME -->` marks). SFT and reward models of part all stay in runs/benchmark_rlhf, for the
others to start from.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from common import ROOT, Benchmark, groups, spread, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

import tiny_gpt_rlhf as gpt  # noqa: E402

SEEDS = range(200, 205)  # the default flags were chosen on 0 to 5
RUNS = ROOT / "runs" / "benchmark_rlhf"


def train(flags: str) -> dict:
    args = gpt.parse_args([*shlex.split(flags), "--quiet", "--output_dir", str(RUNS)])
    return gpt.train(args)


def part_all() -> list[dict]:
    """The default run: every stage of every seed."""
    rows = []
    for seed in tqdm(SEEDS, desc="seeds"):
        shutil.rmtree(RUNS / gpt.SCRIPT / f"all-seed{seed}", ignore_errors=True)
        for stage, found in train(f"--seed {seed}")["stages"].items():
            rows.append({"seed": seed, "stage": stage} | found)
    return rows


def part_cost() -> list[dict]:
    """Seconds and largest resident memory of whole default runs, each a process of its own."""
    import resource  # not on Windows

    rows = []
    for seed in tqdm(SEEDS[:3], desc="seeds"):
        folder = RUNS / "cost"
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--quiet", "--seed", str(seed), "--output_dir", str(folder)]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "tiny_gpt_rlhf.py", *flags], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row = {"seed": seed, "wall": time.perf_counter() - start, "cpu": cpu}
        rows.append(row | {"megabytes": after.ru_maxrss / 1024})  # the largest up to now
    return rows


def given(seed: int) -> str:
    """Flags: the SFT and reward model of a seed of part all."""
    run = RUNS / gpt.SCRIPT / f"all-seed{seed}"
    paths = {stage: run / stage / "checkpoint-last.pt" for stage in ("sft", "rm")}
    return " ".join(f"--{stage}_checkpoint {path}" for stage, path in paths.items())


def grid(lines: dict[tuple[str, str], str]) -> list[dict]:
    """Rows of lines (stage, name): flags, for three seeds."""
    rows = []
    jobs = [(key, seed) for key in lines for seed in SEEDS[:3]]
    for (stage, line), seed in tqdm(jobs, desc="runs"):
        for folder in (RUNS / gpt.SCRIPT).glob("other*"):
            shutil.rmtree(folder, ignore_errors=True)
        flags = f"--stage {stage} {given(seed)} --seed {seed} --run_name other {lines[stage, line]}"
        rows.append({"stage": stage, "line": line, "seed": seed} | train(flags)["stages"][stage])
    return rows


def part_beta() -> list[dict]:
    """Twice the updates, with a pull to the reference and without: is the reward model fooled?"""
    lines = {("ppo", f"beta {b}"): f"--beta {b} --ppo_steps 130" for b in (0, 0.1, 0.3)}
    for b in (0, 0.05, 0.3):
        lines["grpo", f"grpo_beta {b}"] = f"--grpo_beta {b} --grpo_steps 150"
    return grid(lines)


def part_grpo() -> list[dict]:
    """Twice the updates: the KL in the loss as k2 or k3, advantages over the group's std or not."""
    lines = {}
    for kl in ("k2", "k3"):
        for scale in ("none", "group"):
            flags = f"--grpo_kl {kl} --scale_rewards {scale} --grpo_steps 150"
            lines["grpo", f"`--grpo_kl {kl} --scale_rewards {scale}`"] = flags
    return grid(lines)


def part_dpo() -> list[dict]:
    """DPO as it is by default, without alpha, and on pairs of SFT texts."""
    lines = {
        "default": "",
        "`--dpo_alpha 0`: DPO alone": "--dpo_alpha 0",
        "`--dpo_pairs policy`": "--dpo_pairs policy",
    }
    return grid({("dpo", name): flags for name, flags in lines.items()})


PARTS = {name[5:]: part for name, part in list(globals().items()) if name.startswith("part_")}


# ---- tables: medians, with (lowest-highest) of the seeds -----------------------------------------

NAMES = {
    "rm_score": "RM score",
    "true_positive": "truly positive",
    "grammatical": "grammatical",
    "kl_text": "KL, text",
    "kl_token": "KL, character",
    "perplexity": "perplexity",
    "length": "length",
    "stopped": "stopped",
    "distinct_2": "distinct-2",
}
ALL_NAMES = NAMES | {"different": "different texts"}
DIGITS = {"length": 1, "rm_score": 2, "kl_text": 2, "perplexity": 2}


def cells(rows: list[dict], names: list[str]) -> list[str]:
    return [spread(rows, name, DIGITS.get(name, 3)) for name in names]


def table_all(rows: list[dict]) -> str:
    order = ["sft", "ppo", "grpo", "dpo"]
    found = {stage: some for (stage,), some in groups(rows, "stage").items()}
    body = [[stage, *cells(found[stage], list(NAMES))] for stage in order]
    return table(["stage", *NAMES.values()], body)


def table_short(rows: list[dict]) -> str:
    names = ["rm_score", "true_positive", "grammatical", "kl_text", "perplexity", "distinct_2"]
    found = {stage: some for (stage,), some in groups(rows, "stage").items()}
    body = [[stage, *cells(found[stage], names)] for stage in ("sft", "ppo", "grpo", "dpo")]
    return table(["stage", *(NAMES[name] for name in names)], body)


def table_rm(rows: list[dict]) -> str:
    some = [row for row in rows if row["stage"] == "rm"]
    body = [[spread(some, "accuracy"), spread(some, "pair_accuracy")]]
    return table(["labels by the score's sign", "pairs ranked right"], body)


def table_lines(rows: list[dict]) -> str:
    names = ["rm_score", "true_positive", "grammatical", "kl_text", "perplexity", "different"]
    body = [
        [stage, line, *cells(some, names)]
        for (stage, line), some in groups(rows, "stage", "line").items()
    ]
    return table(["stage", "", *(ALL_NAMES[name] for name in names)], body)


def table_cost(rows: list[dict]) -> str:
    memory = f"{max(row['megabytes'] for row in rows):.0f}"
    return table(
        ["all stages, s", "CPU, s", "largest memory, MB"],
        [[spread(rows, "wall", 0), spread(rows, "cpu", 0), memory]],
    )


TABLES = {
    "rlhf_all": (["all"], table_all),
    "rlhf_short": (["all"], table_short),
    "rlhf_rm": (["all"], table_rm),
    "rlhf_beta": (["beta"], table_lines),
    "rlhf_grpo": (["grpo"], table_lines),
    "rlhf_dpo": (["dpo"], table_lines),
    "rlhf_cost": (["cost"], table_cost),
}
BENCHMARK = Benchmark("rlhf", PARTS, TABLES, ["tiny_gpt_rlhf.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
