"""Every number of docs/tiny_gpt_rlhf.md, measured again.

Run:  python benchmarks/rlhf.py              all parts, about 25 minutes on one CPU core
      python benchmarks/rlhf.py beta         only these; the other parts' results stay
      python benchmarks/rlhf.py --tables     only write the tables of docs anew

Results go to benchmarks/results/rlhf.json, tables to the page and README (between their
`<!-- table NAME -->` marks). SFT and reward models of part all stay in runs/benchmark_rlhf, for the
others to start from.
"""

from __future__ import annotations

import resource
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

SEEDS = range(100, 105)  # the default flags were chosen on 0 to 2
RUNS = ROOT / "runs" / "benchmark_rlhf"


def train(flags: str) -> dict:
    args = gpt.parse_args([*shlex.split(flags), "--quiet", "--output_dir", str(RUNS)])
    return gpt.train(args)


def part_all() -> list[dict]:
    """The default run: every stage of every seed."""
    rows = []
    for seed in tqdm(SEEDS, desc="seeds"):
        shutil.rmtree(RUNS / gpt.SCRIPT / f"all-seed{seed}", ignore_errors=True)
        start = time.process_time()
        result = train(f"--seed {seed}")
        cpu = time.process_time() - start
        for stage, found in result["stages"].items():
            row = {"seed": seed, "stage": stage, "wall": result["seconds"], "cpu": cpu}
            rows.append(row | found)
    return rows


def part_memory() -> list[dict]:
    """Largest resident memory of a whole default run, in a process of its own."""
    folder = RUNS / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "tiny_gpt_rlhf.py", "--quiet", "--output_dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return [{"megabytes": peak / 1024}]


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
        flags = f"--stage {stage} {given(seed)} --seed {seed} --run_name other {lines[stage, line]}"
        rows.append({"stage": stage, "line": line, "seed": seed} | train(flags)["stages"][stage])
    return rows


def part_beta() -> list[dict]:
    """Twice the updates, with a pull to the reference and without: is the reward model fooled?"""
    lines = {("ppo", f"beta {b}"): f"--beta {b} --ppo_steps 100" for b in (0, 0.1, 0.3)}
    for b in (0, 0.1, 0.3):
        lines["grpo", f"grpo_beta {b}"] = f"--grpo_beta {b} --grpo_steps 100"
    return grid(lines)


def part_dpo() -> list[dict]:
    """DPO alone, with alpha, and on labelled pairs."""
    lines = {
        "default": "",
        "alpha 0: DPO alone": "--dpo_alpha 0",
        "pairs of labelled reviews": "--dpo_pairs data",
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
    body = [[spread(some, "accuracy"), spread(some, "pair_accuracy"), spread(some, "wall", 0)]]
    body[0].append(spread(some, "cpu", 0))
    header = ["labels by the score's sign", "pairs ranked right", "all stages, s", "CPU, s"]
    return table(header, body)


def table_lines(rows: list[dict]) -> str:
    names = ["rm_score", "true_positive", "grammatical", "kl_text", "perplexity", "distinct_2"]
    body = [
        [stage, line, *cells(some, names)]
        for (stage, line), some in groups(rows, "stage", "line").items()
    ]
    return table(["stage", "", *(NAMES[name] for name in names)], body)


def table_memory(rows: list[dict]) -> str:
    return table(["largest memory, MB"], [[f"{rows[0]['megabytes']:.0f}"]])


TABLES = {
    "rlhf_all": (["all"], table_all),
    "rlhf_short": (["all"], table_short),
    "rlhf_rm": (["all"], table_rm),
    "rlhf_beta": (["beta"], table_lines),
    "rlhf_dpo": (["dpo"], table_lines),
    "rlhf_memory": (["memory"], table_memory),
}
BENCHMARK = Benchmark("rlhf", PARTS, TABLES, ["tiny_gpt_rlhf.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
