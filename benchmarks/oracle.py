"""Every number of docs/policy_gradient_oracle.md, measured again.

Run:  python benchmarks/oracle.py              all parts, about 6 minutes on one CPU core
      python benchmarks/oracle.py default      only these; the other parts' results stay
      python benchmarks/oracle.py --tables     only write the tables of docs anew

Results go to benchmarks/results/oracle.json, tables to the page (between its `<!-- table NAME -->`
marks).
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from common import Benchmark, groups, spread, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

import policy_gradient_oracle as oracle  # noqa: E402


def measure(flags: str, **line: object) -> list[dict]:
    """A row for each point and estimator of one run."""
    with tempfile.TemporaryDirectory() as folder:
        args = oracle.parse_args([*shlex.split(flags), "--output_dir", folder])
        results = oracle.run(args)
    rows = []
    for point, found in results["points"].items():
        head = {"point": point, "seconds": results["seconds"], "batches": args.batches, **line}
        head |= {key: value for key, value in found.items() if key != "estimators"}
        head["best"], head["group_size"] = results["best"], args.group_size
        for name, row in found["estimators"].items():
            rows.append(head | {"estimator": name} | row)
    return rows


def part_default() -> list[dict]:
    """All estimators at three policies, 4,000 batches."""
    return measure("--batches 4000")


def part_cnn() -> list[dict]:
    """The same in the parameters of the CNN, 1,000 batches."""
    return measure("--policy cnn --batches 1000")


def part_gamma() -> list[dict]:
    """Some of them under gamma 0.9."""
    names = "vanilla reinforce trajectory_mean value actor_critic gae grpo:none grpo:group rloo"
    return measure(f"--gamma 0.9 --batches 2000 --estimators {names}")


def part_flat() -> list[dict]:
    """Groups of equal returns, for four sizes."""
    rows = []
    for size in (2, 4, 8, 16):
        flags = f"--estimators rloo --batches 400 --group_size {size} --num_groups {64 // size}"
        rows += measure(flags)
    return rows


def part_inner() -> list[dict]:
    """PPO's gradient steps on a batch: how far their mean step is from the gradient."""
    rows = []
    for epochs, clip in ((1, "0.2"), (2, "0.2"), (4, "0.2"), (8, "0.2"), (4, "inf"), (8, "inf")):
        flags = f"--estimators ppo --batches 1000 --update_epochs {epochs} --clip_epsilon {clip}"
        rows += measure(f"{flags} --points half trained", epochs=epochs, clip=clip)
    return rows


def part_collapse() -> list[dict]:
    """1,500 steps of Adam along the exact gradient of J + bonus * mean entropy, slippery 4x4."""
    rows, lines = [], [("tabular", 0.1, 0.0)]
    lines += [("cnn", rate, bonus) for bonus in (0.0, 0.01, 0.05) for rate in (3e-4, 1e-3)]
    for policy, rate, bonus in tqdm(lines, desc="lines"):
        for seed in range(5 if policy == "cnn" else 1):
            args = oracle.parse_args(["--policy", policy, "--seed", str(seed)])
            lake, network, inputs = oracle.make_policy(args)
            optimizer = torch.optim.Adam(network.parameters(), lr=rate)
            for _ in range(1500):
                log_probs = network(inputs).log_softmax(dim=1)
                value = oracle.exact_return(lake, log_probs.exp(), 1.0, 100)
                entropy = oracle.categorical_entropy(log_probs)[lake.live].mean()
                optimizer.zero_grad()
                (-(value + bonus * entropy)).backward()
                optimizer.step()
            likely = log_probs[lake.live].argmax(dim=1)
            rows.append(
                {
                    "policy": policy,
                    "rate": rate,
                    "bonus": bonus,
                    "seed": seed,
                    "return": value.item(),
                    "entropy": entropy.item(),
                    "same": likely.bincount().max().item() / len(likely),
                }
            )
    return rows


PARTS = {name[5:]: part for name, part in list(globals().items()) if name.startswith("part_")}


def by_point(key: str):
    """One number of every estimator, a column for each policy."""

    def make(rows: list[dict]) -> str:
        found = groups(rows, "estimator")
        points = list(dict.fromkeys(row["point"] for row in rows))
        at = {row["point"]: f"{row['point']}, J {row['return']:.3f}" for row in rows}
        body = [
            [f"`{name}`", *(oracle.cell(row, key, row["batches"]) for row in some)]
            for (name,), some in found.items()
        ]
        return table(["estimator", *(at[point] for point in points)], body)

    return make


def table_overview(rows: list[dict]) -> str:
    """Half-way, some of them."""
    names = ("reinforce", "value", "actor_critic", "actor_critic:learned", "gae", "ppo", "rloo")
    names += ("grpo:none", "grpo:group", "loss_type:grpo", "pairwise:linear_mean")
    body = [
        [f"`{row['estimator']}`", *(oracle.cell(row, k, row["batches"]) for k in oracle.COLUMNS)]
        for row in rows
        if row["point"] == "half" and row["estimator"] in names
    ]
    return table(["estimator", *oracle.COLUMNS], body)


def table_gamma(rows: list[dict]) -> str:
    header = ["estimator", "policy", "scale", "off", "noise"]
    body = [
        [
            f"`{row['estimator']}`",
            row["point"],
            oracle.cell(row, "scale", row["batches"]),
            oracle.cell(row, "off", row["batches"]),
        ]
        + [oracle.cell(row, "noise", row["batches"])]
        for row in sorted(rows, key=lambda row: row["estimator"])
        if row["point"] != "trained"
    ]
    return table(header, body)


def table_flat(rows: list[dict]) -> str:
    body = []
    for row in sorted(rows, key=lambda row: (row["return"], row["group_size"])):
        j, size = row["return"], row["group_size"]
        body.append([f"{j:.3f}", str(size), f"{row['flat']:.4f} ± {row['flat_se']:.4f}"])
        body[-1].append(f"{(1 - j) ** size + j**size:.4f}")
    return table(["J", "G", "flat groups, measured", "(1 - J)^G + J^G"], body)


def table_inner(rows: list[dict]) -> str:
    body = [
        [
            str(row["epochs"]),
            row["clip"],
            row["point"],
            oracle.cell(row, "scale", row["batches"]),
            oracle.cell(row, "off", row["batches"]),
        ]
        + [oracle.cell(row, "noise", row["batches"]), oracle.cell(row, "cosine", row["batches"])]
        for row in rows
    ]
    return table(["gradient steps", "clip", "policy", "scale", "off", "noise", "cosine"], body)


def table_collapse(rows: list[dict]) -> str:
    body = [
        [policy, str(rate), str(bonus), spread(some, "return"), spread(some, "entropy", 2)]
        + [spread(some, "same", 2)]
        for (policy, rate, bonus), some in groups(rows, "policy", "rate", "bonus").items()
    ]
    header = ["policy", "learning rate", "entropy bonus", "J at the end", "mean entropy"]
    return table([*header, "cells with the commonest action"], body)


TABLES = {
    "oracle_overview": (["default"], table_overview),
    "oracle_scale": (["default"], by_point("scale")),
    "oracle_off": (["default"], by_point("off")),
    "oracle_noise": (["default"], by_point("noise")),
    "oracle_cosine": (["default"], by_point("cosine")),
    "oracle_cnn": (["cnn"], by_point("scale")),
    "oracle_cnn_off": (["cnn"], by_point("off")),
    "oracle_gamma": (["gamma"], table_gamma),
    "oracle_flat": (["flat"], table_flat),
    "oracle_inner": (["inner"], table_inner),
    "oracle_collapse": (["collapse"], table_collapse),
}
BENCHMARK = Benchmark("oracle", PARTS, TABLES, ["policy_gradient_oracle.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
