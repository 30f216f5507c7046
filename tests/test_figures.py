"""The pictures of docs/images: each is drawn, from results that say what the pages say."""

import statistics

import figures
import numpy as np
import pytest
import torch
from common import groups
from PIL import Image

from conftest import ROOT

IMAGES = sorted(figures.IMAGES.iterdir())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    figures.main(folder)
    return folder


def test_every_picture_is_drawn_and_no_other_lies_there(drawn):
    assert {path.name for path in drawn.iterdir()} == {path.name for path in IMAGES}
    assert {path.name for path in IMAGES} == figures.FIGURES.keys()


@pytest.mark.parametrize("path", IMAGES, ids=lambda p: p.name)
def test_a_picture_is_small_opaque_and_light(path, drawn):
    """Readable on dark pages, too; one drawn now has the size of the one that is kept."""
    for file in (path, drawn / path.name):
        assert 5_000 < file.stat().st_size < (120_000 if path.suffix == ".png" else 300_000)
        with Image.open(file) as image:
            assert image.n_frames > 1 if path.suffix == ".gif" else image.format == "PNG"
            assert image.convert("RGBA").getextrema()[3] == (255, 255)
            assert np.asarray(image.convert("L")).mean() > 128
            size = image.size
    with Image.open(path) as image:
        assert image.size == size


def test_images_are_small_together():
    assert sum(path.stat().st_size for path in IMAGES) < 2_000_000
    assert (ROOT / "benchmarks" / "results" / "curves.json").stat().st_size < 300_000


def test_a_picture_is_drawn_the_same_again(drawn, tmp_path):
    names = ["clip.png", "learning_text_env.png", "frozen_lake.gif"]
    figures.main(tmp_path, names)
    for name in names:
        assert (tmp_path / name).read_bytes() == (drawn / name).read_bytes()


def test_median_curve_keeps_the_last_value():
    """At every x of any curve: values between points on the line, after the end the last."""
    grid, median = figures.median_curve([([0, 2], [0, 2]), ([0, 1, 4], [1, 1, 4]), ([0], [9])])
    assert grid.tolist() == [0, 1, 2, 4]
    assert median.tolist() == [1, 1, 2, 4]


def test_the_curves_are_those_of_runs_that_learn():
    """Five seeds each, and medians that learn."""
    curves = figures.results("curves")
    for (name,), rows in groups(curves["frozen_lake"], "estimator").items():
        assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
        _, sampled = figures.median_curve([(r["updates"], r["sampled"]) for r in rows])
        _, greedy = figures.median_curve([(r["updates"], r["greedy"]) for r in rows])
        assert sampled[0] < 0.15 and sampled[-1] > 0.99, name
        assert greedy[-1] > (0.99 if name == "ppo" else 0.9)
    for name, rows in groups(curves["cartpole"], "line").items():
        assert len({row["seed"] for row in rows}) == 5
        assert all(20 <= row["sampled"][0] < 30 for row in rows), name
        assert all(row["sampled"][-1] >= 475 for row in rows), name
    steps = {
        name: statistics.median(row["env_steps"][-1] for row in rows)
        for (name,), rows in groups(curves["cartpole"], "line").items()
    }
    assert min(steps, key=steps.get) == "ppo"
    for (target, form), rows in groups(curves["text_env"], "target", "form").items():
        assert len({row["seed"] for row in rows}) == 5
        _, returns = figures.median_curve([(r["texts"], r["expected_return"]) for r in rows])
        assert returns[0] < 0 and 0.95 * len(target) < returns[-1] <= len(target), form


def test_the_stored_agents_do_what_is_said_of_them():
    """The policy table is a policy; its walk arrives; the poles stand and fall as stored."""
    for row in figures.agent("lake_agents", "ppo"):
        probs, tiles = torch.tensor(row["probs"]), row["map"].replace("/", "")
        live = torch.tensor([tile in "SF" for tile in tiles])
        assert torch.allclose(probs[live].sum(dim=1), torch.ones(()), atol=5e-3)
        assert row["greedy"] == 1
        shortest = {r["map"]: r for r in figures.agent("lake_agents", "shortest ways")}
        assert shortest[row["map"]]["sampled"] == 1
        assert len(figures.lake_frames(row)) - 1 >= 6  # no way is shorter on 4x4
    for policy in ("untrained", "ppo"):
        (row,) = figures.agent("cartpole_agent", policy)
        total = row["return"]
        assert total == len(row["actions"]) and (total == 500 if policy == "ppo" else total < 30)
        assert len(figures.pole_frames(row)) == (total + 3) // 4


def test_the_clip_as_drawn():
    ratio = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    for advantage, slopes, values in ((1, [1, 1, 0], [0.5, 1, 1.2]), (-1, [0, -1, -1], None)):
        objective, slope = figures.surrogate_and_slope(ratio, float(advantage))
        assert slope.tolist() == slopes
        assert objective.tolist() == (values or [-0.8, -1, -1.5])


def test_the_pull_as_drawn():
    x = torch.tensor([-3.0, -1.0, 0.5, 4.0], dtype=torch.float64)
    assert torch.allclose(figures.pull("pairwise_linear", x, 2.0), x / 4)
    assert torch.allclose(figures.pull("pairwise_logistic", x, 2.0), (x / 2).sigmoid() - 0.5)
    assert torch.allclose(figures.pull("group_norm", x, 2.0), x.sign() / 8**0.5, rtol=1e-3)
