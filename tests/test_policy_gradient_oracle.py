"""policy_gradient_oracle.py: exact J and gradient, known answers, statistics, command line.

Expectations are computed twice: exactly, over all episodes of a small lake (each episode, or each
pair of episodes, is a batch with a probability), and from sampled batches with standard errors.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import re
import signal
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from torch.nn import functional as F

import policy_gradient_oracle as po
from conftest import close, events_of, golden

F64 = torch.float64
CUSTOM = ("SFFHF", "FGFFF", "FFFHG", "HFFFF")
TINY = ("SFF", "HFG")
SINGLE = 1e-6  # some weights below gamma 1 are powers in single precision, see section 10
LAKES = [
    (tuple(po.MAPS["4x4"]), True),
    (tuple(po.MAPS["4x4"]), False),
    (tuple(po.MAPS["8x8"]), True),
    (tuple(po.MAPS["8x8"]), False),
    (CUSTOM, True),
    (CUSTOM, False),
]


def make_args(*flags: str) -> argparse.Namespace:
    return po.parse_args(["--quiet", *flags])


@functools.cache
def table_of(rows: tuple[str, ...], slippery: bool) -> dict:
    """gymnasium's own transition table, made the usual way."""
    return gym.make("FrozenLake-v1", desc=list(rows), is_slippery=slippery).unwrapped.P


def random_logits(cells: int, seed=0, scale=1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(cells, 4, generator=generator, dtype=F64)


def advantage_sum(lake, probs, q, v) -> torch.Tensor:
    """(S, 4) sum_t d_t(s) * pi(a|s) * (Q_t(s, a) - V_t(s)), t < H, by loops over t."""
    found, at = torch.zeros_like(probs), F.one_hot(torch.tensor(lake.start), len(probs)).to(F64)
    for t in range(len(q)):
        found += at[:, None] * probs * (q[t] - v[t][:, None])
        at = sum(at[s] * probs[s] @ lake.P[s] for s in range(len(probs)))
    return found


# ---- 1  exactness --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows,slippery", LAKES)
def test_lake_is_gymnasiums_table(rows, slippery):
    lake, table = po.build_lake(rows, slippery), table_of(rows, slippery)
    tiles = "".join(rows)
    assert lake.rows == rows and tiles[lake.start] == "S"
    assert lake.live.tolist() == [tile in "SF" for tile in tiles]
    assert lake.prob.shape == (len(tiles), 4, 3 if slippery else 1)
    for s, a in itertools.product(range(len(tiles)), range(4)):
        go_on, reward = [0.0] * len(tiles), 0.0
        for k, (p, following, r, end) in enumerate(table[s][a]):
            assert lake.prob[s, a, k] == p and lake.next_cell[s, a, k] == following
            assert lake.reward[s, a, k] == r and lake.terminated[s, a, k] == end
            go_on[following] += 0.0 if end else p
            reward += p * r
        assert not lake.prob[s, a, len(table[s][a]) :].any()
        assert lake.P[s, a].tolist() == pytest.approx(go_on, abs=1e-15)
        assert lake.r[s, a].item() == pytest.approx(reward, abs=1e-15)
        if not lake.live[s]:
            assert not lake.P[s, a].any() and lake.r[s, a] == 0


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("rows,slippery", [LAKES[0], LAKES[5]])
def test_exact_values_in_loops(rows, slippery, gamma):
    lake, table = po.build_lake(rows, slippery), table_of(rows, slippery)
    cells, horizon = len(lake.live), 9
    probs = random_logits(cells).softmax(dim=1)
    values = [[0.0] * cells for _ in range(horizon + 1)]
    q = [[[0.0] * 4 for _ in range(cells)] for _ in range(horizon)]
    for t, s in itertools.product(reversed(range(horizon)), range(cells)):
        for a in range(4):
            for p, following, r, end in table[s][a]:
                q[t][s][a] += p * (r + gamma * (0 if end else values[t + 1][following]))
        values[t][s] = sum(probs[s, a].item() * q[t][s][a] for a in range(4))
    ours = po.exact_values(lake, probs, gamma, horizon)
    close(ours[0], torch.tensor(values, dtype=F64), 1e-14)
    close(ours[1], torch.tensor(q, dtype=F64), 1e-14)
    assert po.exact_return(lake, probs, gamma, horizon) == ours[0][0, lake.start]
    best = [0.0] * cells
    for _ in range(horizon):
        best = [
            max(
                sum(p * (r + gamma * (0 if end else best[z])) for p, z, r, end in table[s][a])
                for a in range(4)
            )
            for s in range(cells)
        ]
    close(po.optimal_values(lake, gamma, horizon)[0], torch.tensor(best, dtype=F64), 1e-14)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("rows,slippery", LAKES)
def test_gradients_by_finite_differences(rows, slippery, gamma):
    """Of J and of the episodes' KL, every component of 4x4, random directions of the others."""
    lake, cells = po.build_lake(rows, slippery), len("".join(rows))
    logits = random_logits(cells, 3)
    horizon = {16: 20, 64: 30, 20: 12}[cells]
    args = make_args("--gamma", str(gamma), "--max_episode_steps", str(horizon))
    ref = po.reference(cells)

    def functions(theta):
        log_probs = theta.view(cells, 4).log_softmax(dim=1)
        return torch.stack(
            [
                po.exact_return(lake, log_probs.exp(), gamma, horizon),
                po.exact_kl(lake, log_probs, ref, horizon),
            ]
        )

    true = torch.stack(po.true_gradients(lake, logits, args))  # (2, D)
    count = 4 * cells
    directions = torch.eye(count, dtype=F64) if cells == 16 else random_logits(8 * cells)[:, :1]
    for d in directions.reshape(-1, count):
        ahead, behind = (
            functions(logits.flatten() + 1e-4 * d),
            functions(logits.flatten() - 1e-4 * d),
        )
        close((ahead - behind) / 2e-4, true @ d, 1e-8 if cells == 16 else 1e-6)
    assert true.norm(dim=1).min() > 1e-6


@pytest.mark.parametrize("slippery", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gradient_of_a_cnn_by_finite_differences(slippery, gamma):
    args = make_args("--policy", "cnn", "--map", "SFFHF/FGFFF/FFFHG/HFFFF")
    args.frozen_lake_slippery = slippery
    lake, policy, inputs = po.make_policy(args)
    weights = list(policy.parameters())
    with torch.no_grad():
        for p in weights:
            p.mul_(2.0)

    def value():
        return po.exact_return(lake, policy(inputs).softmax(dim=1), gamma, 15)

    gradient = torch.autograd.grad(value(), weights)
    torch.manual_seed(5)
    for _ in range(4):
        steps = [torch.randn_like(p) for p in weights]
        found = []
        with torch.no_grad():
            for sign in (1, -1):
                for p, step in zip(weights, steps, strict=True):
                    p.add_(sign * 1e-6 * step)
                found.append(value())
                for p, step in zip(weights, steps, strict=True):
                    p.sub_(sign * 1e-6 * step)
        along = sum((g * s).sum() for g, s in zip(gradient, steps, strict=True))
        close((found[0] - found[1]) / 2e-6, along, 1e-8)
    assert sum(g.square().sum() for g in gradient) > 1e-8


def test_golden_returns_and_optimal_values():
    cases = golden("frozenlake")["cases"]
    assert len(cases) >= 2
    for case in cases:
        lake = po.build_lake(tuple(case["desc"]), case["is_slippery"])
        horizon = case["time_limit"]
        uniform = torch.full((len(lake.live), 4), 0.25, dtype=F64)
        close(
            po.exact_return(lake, uniform, 1.0, horizon).item(),
            case["uniform_random_return_within_time_limit"],
        )
        best = po.optimal_values(lake, 1.0, horizon)[0]
        close(best.tolist(), case["V_finite_horizon_gamma1"])
        close(best[lake.start].item(), case["V_start_finite_horizon_gamma1"])
        values, q = po.optimal_values(lake, 0.99)
        close(values.tolist(), case["V_gamma099"], 1e-11)
        close(q.tolist(), case["Q_gamma099"], 1e-11)
        greedy = F.one_hot((q + 1e-9 * torch.tensor([3, 2, 1, 0])).argmax(dim=1), 4).to(F64)
        close(
            po.exact_return(lake, greedy, 1.0, horizon).item(),
            case["greedy099_return_within_time_limit"],
        )
        endless = po.optimal_values(lake, 1.0)[0][lake.start].item()
        close(endless, case["V_start_gamma1_no_time_limit"], 1e-10)


@pytest.mark.parametrize("rows,slippery", LAKES)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_bellman_residuals_and_long_horizon(rows, slippery, gamma):
    lake = po.build_lake(rows, slippery)
    probs = random_logits(len(lake.live), 2, 0.5).softmax(dim=1)
    values, q = po.policy_values(lake, probs, gamma)
    close(q, lake.r + gamma * lake.P @ values, 1e-12)
    assert (values - (probs * q).sum(dim=1)).abs().max() < 1e-10
    far = po.exact_values(lake, probs, gamma, 5000)
    assert (far[0][0] - values).abs().max() < 1e-9 and (far[1][0] - q).abs().max() < 1e-9
    values, q = po.optimal_values(lake, gamma)
    assert (values - q.amax(dim=1)).abs().max() < 1e-10
    close(q, lake.r + gamma * lake.P @ values, 1e-12)
    assert (values >= far[0][0] - 1e-12).all()
    assert not values[~lake.live].any() and values[lake.start] > 0.005


@pytest.mark.parametrize("rows,slippery", LAKES)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_policy_gradient_theorem(rows, slippery, gamma):
    """sum_t gamma^t d_t(s) pi(a|s) (Q_t - V_t) is the autograd gradient."""
    lake = po.build_lake(rows, slippery)
    logits = random_logits(len(lake.live), 4)
    probs = logits.softmax(dim=1)
    args = make_args("--gamma", str(gamma), "--max_episode_steps", "30")
    values, q = po.exact_values(lake, probs, gamma, 30)
    d = po.visits(lake, probs, 30) * gamma ** torch.arange(30, dtype=F64)[:, None]
    theorem = (d[:, :, None] * probs * (q - values[:-1, :, None])).sum(dim=0)
    close(po.true_gradients(lake, logits, args)[0], theorem.flatten(), 1e-13)


@pytest.mark.parametrize("rows,slippery", [LAKES[0], LAKES[5]])
def test_visits_and_kl_in_loops(rows, slippery):
    lake, table = po.build_lake(rows, slippery), table_of(rows, slippery)
    cells, horizon = len(lake.live), 8
    log_probs, ref = random_logits(cells, 1).log_softmax(dim=1), po.reference(cells)
    probs = log_probs.exp().tolist()
    at, kl, acts = {lake.start: 1.0}, 0.0, []
    for _ in range(horizon):
        acts.append(dict(at))
        following = {}
        for s, weight in at.items():
            for a in range(4):
                kl += weight * probs[s][a] * (log_probs[s, a] - ref[s, a]).item()
                for p, z, _, end in table[s][a]:
                    if not end:
                        following[z] = following.get(z, 0.0) + weight * probs[s][a] * p
        at = following
    ours = po.visits(lake, log_probs.exp(), horizon)
    assert ours.shape == (horizon, cells)
    for t, expected in enumerate(acts):
        assert ours[t].tolist() == pytest.approx([expected.get(s, 0.0) for s in range(cells)])
    close(po.exact_kl(lake, log_probs, ref, horizon).item(), kl, 1e-13)
    sums = ours.sum(dim=1)
    assert sums[0] == 1 and (sums.diff() <= 1e-12).all() and 0 < sums[-1] < 1
    assert not ours[:, ~lake.live].any()
    assert po.exact_kl(lake, ref, ref, horizon) == 0


def test_reference_is_always_the_same():
    a, b = po.reference(16), po.reference(16)
    assert torch.equal(a, b) and a.exp().sum(dim=1).tolist() == pytest.approx([1.0] * 16)
    assert a.std() > 0.3
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        po.reference(16)
        assert torch.equal(state, torch.get_rng_state())


def test_observations_are_planes_of_the_map():
    lake = po.build_lake(CUSTOM, True)
    planes = po.observe(lake)
    assert planes.shape == (20, 5, 4, 5) and planes.dtype == F64
    for s, i, j in itertools.product(range(20), range(4), range(5)):
        expected = [float(CUSTOM[i][j] == tile) for tile in "SFHG"] + [float(s == 5 * i + j)]
        assert planes[s, :, i, j].tolist() == expected


@pytest.mark.parametrize("policy", ["tabular", "cnn"])
def test_ascend_is_adam_on_the_exact_return(policy, monkeypatch):
    """Three steps by hand: ascent, its rate, the CNN's entropy bonus over live cells."""
    args = make_args("--policy", policy, "--max_episode_steps", "12", "--gamma", "0.9")
    lake, ours, inputs = po.make_policy(args)
    theirs, start = copy.deepcopy(ours), copy.deepcopy(ours)
    real, calls = po.exact_return, []

    def exact_return(*given):
        calls.append(given[2:])
        return real(*given) + (1e9 if len(calls) == 4 else 0.0)

    monkeypatch.setattr(po, "exact_return", exact_return)
    po.ascend(ours, lake, inputs, args, 1e6)
    assert calls == [(0.9, 12)] * 4
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1 if policy == "tabular" else 1e-3)
    for _ in range(3):
        probs = theirs(inputs).softmax(dim=1)
        entropy = -(probs * probs.log()).sum(dim=1)[lake.live].mean()
        loss = -real(lake, probs, 0.9, 12) - (0.0 if policy == "tabular" else 0.05) * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for a, b, c in zip(*(net.parameters() for net in (ours, theirs, start)), strict=True):
        close(a, b, 1e-9)
        assert not torch.equal(a, c)


def test_ascend_stops_at_the_goal():
    args = make_args()
    lake, policy, inputs = po.make_policy(args)
    value = po.exact_return(lake, policy(inputs).softmax(dim=1), 1.0, 100).item()
    for goal in (0.0, value):
        po.ascend(policy, lake, inputs, args, goal)
        assert not policy.theta.any()
    last = 0.0139
    for goal in (0.2, 0.37, 0.6):
        po.ascend(policy, lake, inputs, args, goal)
        value = po.exact_return(lake, policy(inputs).softmax(dim=1), 1.0, 100).item()
        assert goal <= value < goal + 0.03 and value > last
        last = value


# ---- 2  episodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows,slippery,horizon,seed",
    [(*LAKES[0], 100, 0), (*LAKES[0], 7, 1), (*LAKES[5], 12, 2), (("SG",), True, 3, 3)],
)
def test_episodes_follow_the_table(rows, slippery, horizon, seed):
    lake, table = po.build_lake(rows, slippery), table_of(rows, slippery)
    probs = random_logits(len(lake.live), seed, 0.5).softmax(dim=1)
    batch = po.sample_batch(lake, probs, 300, horizon, torch.Generator().manual_seed(seed))
    longest = goals = limits = holes = 0
    fields = [getattr(batch, f.name).tolist() for f in dataclasses.fields(batch)]
    for cells, actions, rewards, terminated, truncated, mask, following in zip(
        *fields, strict=True
    ):
        cell, alive = lake.start, True
        for t in range(len(cells)):
            assert mask[t] == alive
            if not alive:
                assert rewards[t] == 0 and not terminated[t] and not truncated[t]
                continue
            assert cells[t] == cell
            step = {z: (r, end) for p, z, r, end in table[cell][actions[t]] if p > 0}
            assert (rewards[t], terminated[t]) == step[following[t]]
            assert truncated[t] == (t == horizon - 1 and not terminated[t])
            cell, alive, longest = following[t], not terminated[t], max(longest, t + 1)
            goals, limits = goals + rewards[t], limits + truncated[t]
            holes += terminated[t] and rewards[t] == 0
    assert longest == len(fields[0][0]) <= horizon
    assert longest == horizon or not limits
    assert goals + holes + limits == 300 and (goals > 0 or horizon == 7)


def test_frequencies_of_episodes():
    """Actions, outcomes, visits and J, each within five standard errors."""
    lake = po.build_lake(CUSTOM, True)
    probs = random_logits(20, 7, 0.7).softmax(dim=1)
    num, horizon = 20000, 30
    batch = po.sample_batch(lake, probs, num, horizon, torch.Generator().manual_seed(1))
    d = po.visits(lake, probs, horizon)
    for t in (0, 1, 2, 5, 15, horizon - 1):
        counts = torch.bincount(batch.cells[:, t][batch.mask[:, t]], minlength=20)
        error = (d[t] * (1 - d[t]) / num).sqrt()
        assert ((counts / num - d[t]).abs() <= 5 * error + 1e-12).all()
    pairs = (batch.cells * 4 + batch.actions)[batch.mask]
    taken = torch.bincount(pairs, minlength=80).view(20, 4).double()
    count = taken.sum(dim=1, keepdim=True).clamp(min=1)
    error = (probs * (1 - probs) / count).sqrt()
    assert ((taken / count - probs).abs() <= 5 * error)[count[:, 0] > 100].all()
    triples = (pairs * 20 + batch.next_cells[batch.mask]).bincount(minlength=1600).view(20, 4, 20)
    table = torch.zeros(20, 4, 20, dtype=F64).scatter_add_(2, lake.next_cell, lake.prob)
    error = (table * (1 - table) / taken[..., None].clamp(min=1)).sqrt()
    off = (triples / taken[..., None].clamp(min=1) - table).abs() > 5 * error + 1e-12
    assert not off[taken > 100].any() and (taken > 100).sum() > 30
    j = po.exact_return(lake, probs, 1.0, horizon).item()
    assert abs(batch.rewards.sum() / num - j) < 5 * (j * (1 - j) / num) ** 0.5


# ---- 3  all episodes of a small lake: expectations to the last digit -----------------------------


def all_episodes(lake: po.Lake, probs: torch.Tensor, horizon: int) -> tuple[list, torch.Tensor]:
    """Every episode as a list of (cell, action, reward, terminated, truncated, next), and p."""
    done, going = [], [([], lake.start, 1.0)]
    for t in range(horizon):
        found = []
        for steps, s, weight in going:
            for a, k in itertools.product(range(4), range(lake.prob.shape[2])):
                p = weight * probs[s, a].item() * lake.prob[s, a, k].item()
                end, z = lake.terminated[s, a, k].item(), lake.next_cell[s, a, k].item()
                limit = not end and t == horizon - 1
                if p > 0:
                    step = (s, a, lake.reward[s, a, k].item(), end, limit, z)
                    target = done if end or limit else found
                    target.append((steps + [step], z, p))
        going = found
    return [steps for steps, _, _ in done], torch.tensor([p for *_, p in done], dtype=F64)


def to_batch(episodes: list, length: int) -> po.Batch:
    """Episodes padded with junk that a mask must keep out."""
    columns = []
    for k in range(6):
        junk = (0, 3, 0.0, False, False, 0)[k]
        columns.append([[s[k] for s in e] + [junk] * (length - len(e)) for e in episodes])
    cells, actions, rewards, terminated, truncated, following = columns
    mask = [[t < len(e) for t in range(length)] for e in episodes]
    return po.Batch(
        torch.tensor(cells),
        torch.tensor(actions),
        torch.tensor(rewards, dtype=F64),
        torch.tensor(terminated),
        torch.tensor(truncated),
        torch.tensor(mask),
        torch.tensor(following),
    )


class Exact:
    """All batches of `group` episodes of a small lake, and their probabilities."""

    def __init__(self, rows, slippery, horizon, group, gamma=1.0, seed=11, **flags):
        self.lake, self.horizon, self.gamma = po.build_lake(rows, slippery), horizon, gamma
        self.logits = random_logits(len(self.lake.live), seed)
        self.log_probs = self.logits.log_softmax(dim=1)
        self.probs = self.log_probs.exp()
        self.args = make_args("--gamma", str(gamma), "--max_episode_steps", str(horizon))
        vars(self.args).update(num_groups=1, group_size=group, **flags)
        episodes, p = all_episodes(self.lake, self.probs, horizon)
        assert abs(p.sum() - 1) < 1e-12
        chosen = list(itertools.product(range(len(episodes)), repeat=group))
        self.weights = p[torch.tensor(chosen)].prod(dim=1)
        flat = [episodes[i] for picked in chosen for i in picked]
        self.x = po.prepare(self.lake, to_batch(flat, horizon), self.log_probs, self.args)
        assert self.x.num == len(chosen)

    def expect(self, name, x=None, **flags) -> torch.Tensor:
        args = argparse.Namespace(**vars(self.args) | flags)
        return self.weights @ po.gradients(name, x or self.x, self.logits, args)

    @functools.cached_property
    def truth(self) -> torch.Tensor:
        return po.true_gradients(self.lake, self.logits, self.args)[0]

    def reward_to_go(self) -> torch.Tensor:
        v, q = po.exact_values(self.lake, self.probs, self.gamma, self.horizon)
        return advantage_sum(self.lake, self.probs, q, v).flatten()


SMALL = [(TINY, False, 4, 1.0), (TINY, False, 4, 0.9), (("SFH", "FGF"), True, 3, 1.0)]
SMALL += [(("SFH", "FGF"), True, 3, 0.9)]


@functools.cache
def singles(k: int) -> Exact:
    rows, slippery, horizon, gamma = SMALL[k]
    return Exact(rows, slippery, horizon, 1, gamma)


@functools.cache
def pairs(gamma=1.0) -> Exact:
    return Exact(("SF", "HG"), False, 3, 2, gamma)


@functools.cache
def triples(gamma=1.0) -> Exact:
    return Exact(("SF", "FG"), False, 2, 3, gamma)


@pytest.mark.parametrize("k", range(4))
def test_expectation_of_the_plain_estimators(k):
    """With the discounted return from the start no weight is missing; reward-to-go lacks one."""
    case = singles(k)
    single = 1e-13 if case.gamma == 1 else SINGLE
    close(case.expect("vanilla"), case.truth, single)
    expected = case.reward_to_go()
    for name in ("reinforce", "value", "actor_critic", "gae"):
        close(case.expect(name), expected, 1e-13)
    for n, lam in ((1, 0.0), (2, 0.3), (9, 1.0)):
        close(case.expect("nstep", n_steps=n), expected, single)
        close(case.expect("gae", lam=lam), expected, 1e-13)
        # not 0: at the clamp's very border its gradient differs between versions of torch
        close(case.expect("ppo", lam=lam, update_epochs=1, clip_epsilon=1e-9), expected, 1e-12)
    if case.gamma == 1:
        close(expected, case.truth, 1e-13)
    else:
        assert (expected - case.truth).norm() > 0.05 * case.truth.norm()


@pytest.mark.parametrize("k", range(4))
def test_expectation_with_any_critic(k):
    """V of the cell alone: a baseline is unbiased; bootstrapping follows a recursion of its own."""
    case = singles(k)
    lake, probs, gamma = case.lake, case.probs, case.gamma
    critic = torch.rand(len(lake.live), dtype=F64) + 0.2  # also in terminal cells
    batch = case.x.batch
    learned, following = critic[batch.cells], critic[batch.next_cells]
    x = dataclasses.replace(case.x, learned=learned, next_learned=following)
    close(case.expect("value:learned", x), case.reward_to_go(), 1e-13)
    for n, lam in ((1, 0.0), (2, 0.6), (9, 1.0)):
        td = lake.r + gamma * lake.P @ critic - critic[:, None]
        gae, table = [td], [[td] * case.horizon]
        for _ in range(case.horizon - 1):  # backwards in t
            gae.append(td + gamma * lam * lake.P @ (probs * gae[-1]).sum(dim=1))
        for _ in range(n - 1):
            last = table[-1] + [torch.zeros_like(td)]
            table.append([td + gamma * lake.P @ (probs * q).sum(dim=1) for q in last[1:]])
        zero = torch.zeros(case.horizon, len(probs), dtype=F64)
        expected = advantage_sum(lake, probs, torch.stack(gae[::-1]), zero)
        centred = expected - probs * expected.sum(dim=1, keepdim=True)
        close(case.expect("gae:learned", x, lam=lam), centred.flatten(), 1e-13)
        expected = advantage_sum(lake, probs, torch.stack(table[-1]), zero)
        centred = expected - probs * expected.sum(dim=1, keepdim=True)
        single = 1e-13 if gamma == 1 else SINGLE
        close(case.expect("nstep:learned", x, n_steps=n), centred.flatten(), single)
    expected = advantage_sum(lake, probs, td.expand(case.horizon, -1, -1), zero)
    centred = (expected - probs * expected.sum(dim=1, keepdim=True)).flatten()
    close(case.expect("actor_critic:learned", x), centred, 1e-13)
    assert (centred - case.reward_to_go()).norm() > 0.05 * centred.norm()  # biased


@pytest.mark.parametrize("k", [0, 2])
def test_bootstrapping_at_the_limit_gives_the_unlimited_gradient(k):
    """V without a step limit, through truncation: sum_{t<H} d_t(s) pi(a|s) Q(s, a). Death: not."""
    case = singles(k)
    values, q = po.policy_values(case.lake, case.probs, case.gamma)
    batch, long = case.x.batch, case.horizon
    x = dataclasses.replace(
        case.x, values=values[batch.cells], next_values=values[batch.next_cells]
    )
    expected = advantage_sum(case.lake, case.probs, q.expand(long, -1, -1), values.expand(long, -1))
    for name, flags in (
        ("gae", {"lam": 0.0}),
        ("gae", {"lam": 0.7}),
        ("gae", {"lam": 1.0}),
        ("nstep", {"n_steps": 2}),
        ("nstep", {"n_steps": 99}),
        ("actor_critic", {}),
    ):
        close(case.expect(name, x, **flags), expected.flatten(), 1e-13)
        dead = dataclasses.replace(batch, terminated=batch.terminated | batch.truncated)
        wrong = case.expect(name, dataclasses.replace(x, batch=dead), **flags)
        assert (wrong - expected.flatten()).norm() > 0.05 * expected.norm()
    assert (case.truth - expected.flatten()).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("k", range(4))
def test_expectation_of_the_kl_terms(k):
    case = singles(k)
    lake, probs, horizon = case.lake, case.probs, case.horizon
    ref = po.reference(len(lake.live))
    d = po.visits(lake, probs, horizon).sum(dim=0)  # (S,)
    leaf = case.logits.clone().requires_grad_()
    log_probs = leaf.log_softmax(dim=1)
    backward = (log_probs.exp() * (log_probs - ref)).sum(dim=1)  # KL(pi || ref)
    forward = (ref.exp() * (ref - log_probs)).sum(dim=1)  # KL(ref || pi)
    (of_backward,) = torch.autograd.grad((d * backward).sum(), leaf, retain_graph=True)
    (of_forward,) = torch.autograd.grad((d * forward).sum(), leaf)
    close(case.expect("k1:loss"), torch.zeros_like(case.truth), 1e-14)
    close(case.expect("k2:loss"), of_backward.flatten(), 1e-13)
    close(case.expect("k3:loss"), of_forward.flatten(), 1e-13)
    of_kl = po.true_gradients(lake, case.logits, case.args)[1]
    close(case.expect("k1:reward"), of_kl, 1e-13)
    for other in (of_backward.flatten(), of_forward.flatten(), case.expect("k3:reward")):
        assert (other - of_kl).norm() > 0.05 * of_kl.norm()
    # k2, k3 in the reward: the gradient of E[sum k], less that of k itself in its log pi
    q = [torch.zeros_like(probs)] * 2
    table: list[list] = [[], []]
    log_ratio = ref - case.log_probs
    ks = 0.5 * log_ratio.square(), log_ratio.exp() - log_ratio - 1
    for _ in range(horizon):
        q = [
            k + lake.P @ (probs * following).sum(dim=1) for k, following in zip(ks, q, strict=True)
        ]
        for t, x in zip(table, q, strict=True):
            t.insert(0, x)
    for name, t in zip(("k2:reward", "k3:reward"), table, strict=True):
        found = advantage_sum(lake, probs, torch.stack(t), torch.zeros(horizon, len(probs)))
        close(case.expect(name), (found - probs * found.sum(dim=1, keepdim=True)).flatten(), 1e-13)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("cases,size", [(pairs, 2), (triples, 3)])
def test_expectation_of_the_group_estimators(cases, size, gamma):
    case = cases(gamma)
    shrink, single = (size - 1) / size, 1e-12 if gamma == 1 else SINGLE
    for name in ("vanilla", "rloo", "pairwise:linear"):
        close(case.expect(name), case.truth, single)
    close(case.expect("grpo:none"), shrink * case.truth, single)
    if size == 3:  # loops over batches
        close(case.expect("loss_type:dr_grpo"), shrink / case.horizon * case.truth, single)
    if gamma == 1:  # R is 0 or 1
        pull = 2 * (1 / (1 + math.exp(-1)) - 0.5)
        close(case.expect("pairwise:logistic"), pull * case.truth, 1e-12)
        # k of G win: mean k/G, std sqrt(k (G - k) / (G (G - 1)))
        for name in ("grpo:group", "grpo:batch")[: size - 1]:  # here a batch is one group
            found = case.expect(name)
            cosine = found @ case.truth / found.norm() / case.truth.norm()
            assert 1 - cosine < 1e-12
            assert found.norm() / case.truth.norm() > 1.2 * shrink
        if size == 2:  # +-1/sqrt(2) instead of +-1/2; eps 1e-4
            ratio = 0.5 / (0.5**0.5 + 1e-4)
            close(case.expect("grpo:group"), ratio * case.truth, 1e-12)


def test_batch_time_mean_shrinks_where_lengths_are_equal():
    """(n - 1) / n: episodes of one step, and of three (no hole, the goal three steps away)."""
    for rows, horizon, group in ((("SG",), 1, 3), (("SFF", "FFG"), 3, 2)):
        case = Exact(rows, False, horizon, group)
        assert case.x.batch.mask.all()
        expected = (group - 1) / group * case.expect("reinforce")
        close(case.expect("batch_time_mean"), expected, 1e-12)
        assert expected.norm() > 0.02
    ragged = pairs()
    assert not ragged.x.batch.mask.all()
    assert (ragged.expect("batch_time_mean") - 0.5 * ragged.truth).norm() > 1e-3


def test_trajectory_mean():
    """One reward at the end, gamma 1: all G_t are the same, and nothing is left."""
    assert not po.gradients(
        "trajectory_mean", singles(0).x, singles(0).logits, singles(0).args
    ).any()
    case = singles(1)  # gamma 0.9
    found, expected = case.expect("trajectory_mean"), case.reward_to_go()
    assert found.norm() > 1e-3 and (found - expected).norm() > 0.5 * expected.norm()


@pytest.mark.parametrize("k", range(4))
def test_reward_on_an_extra_row_scales_the_gradient_by_gamma(k):
    case = singles(k)
    batch, gamma = case.x.batch, case.gamma
    rewards = F.pad(batch.rewards, (1, 0))
    rows = {
        f.name: F.pad(getattr(batch, f.name), (0, 1))
        for f in dataclasses.fields(batch)
        if f.name != "rewards"
    }
    wide = {
        f.name: F.pad(getattr(case.x, f.name), (0, 1))
        for f in dataclasses.fields(case.x)
        if f.name not in ("batch", "num", "shape")
    }
    x = dataclasses.replace(case.x, batch=po.Batch(rewards=rewards, **rows), **wide)
    for name in ("vanilla", "reinforce"):
        a, b = (po.gradients(name, y, case.logits, case.args) for y in (x, case.x))
        close(a, gamma * b, 1e-14 if gamma == 1 or name == "reinforce" else SINGLE)
    # the exact one too: a goal that pays when it is left, one step later
    lake = copy.deepcopy(case.lake)
    goal = "".join(lake.rows).index("G")
    paying = (lake.next_cell == goal) & (lake.reward > 0)
    lake.P.scatter_add_(2, lake.next_cell, lake.prob * paying)
    lake.r.zero_()[goal] = 1.0
    leaf = case.logits.clone().requires_grad_()
    late = po.exact_return(lake, leaf.softmax(dim=1), gamma, case.horizon + 1)
    (gradient,) = torch.autograd.grad(late, leaf)
    close(gradient.flatten(), gamma * case.truth, 1e-13)


# ---- 4  sample by sample -------------------------------------------------------------------------


class Sampled:
    """Many batches of one policy; gradients and their description, computed once."""

    def __init__(self, batches, flags, logits=None, point=None, seed=0):
        torch.set_num_threads(1)
        self.args = make_args("--batches", str(batches), *flags)
        self.lake, policy, inputs = po.make_policy(self.args)
        args = self.args
        if point:
            best = po.optimal_values(self.lake, args.gamma, args.max_episode_steps)[0]
            goal = point * best[self.lake.start].item()
            po.ascend(policy, self.lake, inputs, args, goal)
        self.logits = policy(inputs).detach() if logits is None else logits
        self.log_probs = self.logits.log_softmax(dim=1)
        self.probs = self.log_probs.exp()
        self.truth, self.of_kl = po.true_gradients(self.lake, self.logits, args)
        episodes = batches * args.num_groups * args.group_size
        generator = torch.Generator().manual_seed(seed)
        self.batch = po.sample_batch(
            self.lake, self.probs, episodes, args.max_episode_steps, generator
        )
        self.x = po.prepare(self.lake, self.batch, self.log_probs, args)
        self.known: dict[str, torch.Tensor] = {}

    def gradients(self, name: str) -> torch.Tensor:
        if name not in self.known:
            self.known[name] = po.gradients(name, self.x, self.logits, self.args)
        return self.known[name]

    def row(self, name: str) -> dict[str, float]:
        return po.describe(self.gradients(name), self.of_kl if name in po.KL else self.truth)

    def chi_square(self, name: str, expected: torch.Tensor) -> float:
        """p-value of the mean: twelve random projections, Hotelling's test by its normal limit."""
        from scipy import stats

        generator = torch.Generator().manual_seed(9)
        count = len(expected)
        projections = torch.randn(count, 12, generator=generator, dtype=F64)
        samples = (self.gradients(name) - expected) @ projections
        mean, number = samples.mean(dim=0), len(samples)
        statistic = number * mean @ torch.linalg.solve(torch.cov(samples.T), mean)
        return stats.chi2.sf(statistic.item(), 12)


@pytest.fixture(scope="module")
def few() -> Sampled:
    """Twelve batches on the custom map, gamma 0.9: for loops."""
    flags = ["--map", "/".join(CUSTOM), "--gamma", "0.9", "--num_groups", "3", "--group_size", "4"]
    return Sampled(12, [*flags, "--max_episode_steps", "9"], random_logits(20, 8, 0.6))


@pytest.fixture(scope="module")
def start() -> Sampled:
    """4x4, slippery, the uniform policy: J 0.014."""
    return Sampled(700, [])


@pytest.fixture(scope="module")
def half() -> Sampled:
    """4x4, slippery, half of the highest J."""
    return Sampled(250, [], point=0.5)


@pytest.fixture(scope="module")
def poor() -> Sampled:
    """The same policy, batches of four episodes."""
    return Sampled(2000, ["--num_groups", "1", "--group_size", "4"], point=0.5)


@pytest.fixture(scope="module")
def discounted() -> Sampled:
    """The custom map, gamma 0.9, a random policy."""
    flags = ["--map", "/".join(CUSTOM), "--gamma", "0.9", "--max_episode_steps", "30"]
    return Sampled(300, flags, random_logits(20, 7, 0.7))


def weigh(case, weights: list) -> torch.Tensor:
    """(M, D) sum of weights[n][t] * grad log pi(a_t|s_t) over each batch's steps, in loops."""
    per_batch = len(weights) // case.x.num
    found = torch.zeros(case.x.num, *case.logits.shape, dtype=F64)
    cells, actions = case.batch.cells.tolist(), case.batch.actions.tolist()
    for n, row in enumerate(weights):
        for t, w in enumerate(row):
            found[n // per_batch, cells[n][t]] -= w * case.probs[cells[n][t]]
            found[n // per_batch, cells[n][t], actions[n][t]] += w
    return found.flatten(1)


def loop_returns(case) -> list[list[float]]:
    found = []
    for rewards, mask in zip(case.batch.rewards.tolist(), case.batch.mask.tolist(), strict=True):
        length = sum(mask)
        row = [sum(0.9 ** (u - t) * rewards[u] for u in range(t, length)) for t in range(length)]
        found.append(row)
    return found


def test_prepare_reads_the_tables(few):
    case, x = few, few.x
    v, _ = po.exact_values(case.lake, case.probs, 0.9, 9)
    ref = po.reference(20)
    assert x.num == 12 and x.shape == (36, 4) and case.batch.truncated.any()
    for n, t in case.batch.mask.nonzero().tolist():
        s, a, z = (
            f[n, t].item() for f in (case.batch.cells, case.batch.actions, case.batch.next_cells)
        )
        assert x.values[n, t] == v[t, s] and x.next_values[n, t] == v[t + 1, z]
        assert x.logp_old[n, t] == case.log_probs[s, a] and x.log_ref[n, t] == ref[s, a]
    assert x.split(x.values).shape == (12, 12, case.batch.cells.shape[1])
    scores = x.scores(0.9).flatten().tolist()
    assert scores == pytest.approx([row[0] for row in loop_returns(case)], rel=SINGLE)


def test_learned_values_in_loops(few):
    """Mean return of a cell's visits in the batch before; the first batch has the last one's."""
    returns, cells = loop_returns(few), few.batch.cells.tolist()
    tables = []
    for m in range(12):
        total, count = [0.0] * 20, [0] * 20
        for n in range(12 * m, 12 * m + 12):
            for t, g in enumerate(returns[n]):
                total[cells[n][t]] += g
                count[cells[n][t]] += 1
        tables.append([a / b if b else 0.0 for a, b in zip(total, count, strict=True)])
    tensor = torch.tensor(tables, dtype=F64)
    reinforce = po.compute_reinforce(few.batch.rewards, 0.9)
    close(po.learn_values(few.batch, reinforce, 12, 20), tensor, 1e-13)
    for n, t in few.batch.mask.nonzero().tolist():
        s, z = few.batch.cells[n, t], few.batch.next_cells[n, t]
        assert abs(few.x.learned[n, t] - tensor[n // 12 - 1, s]) < 1e-13
        assert abs(few.x.next_learned[n, t] - tensor[n // 12 - 1, z]) < 1e-13


def test_nothing_after_an_end_counts(few):
    """One more column of junk behind all episodes: the same gradients."""
    cells = {"cells": 1, "actions": 2, "next_cells": 3}
    fields = [f.name for f in dataclasses.fields(few.batch)]
    rows = {k: F.pad(getattr(few.batch, k), (0, 1), value=cells.get(k, 0)) for k in fields}
    names = ("logp_old", "log_ref", "values", "next_values", "learned", "next_learned")
    wide = {k: F.pad(getattr(few.x, k), (0, 1), value=-7.0) for k in names}
    x = dataclasses.replace(few.x, batch=po.Batch(**rows), **wide)
    for name in po.ESTIMATORS:
        close(po.gradients(name, x, few.logits, few.args), few.gradients(name), 1e-13)
    returns = po.compute_reinforce(few.batch.rewards, 0.9)
    learned = po.learn_values(few.batch, returns, 12, 20)
    close(po.learn_values(x.batch, F.pad(returns, (0, 1), value=5.0), 12, 20), learned)


def loop_phi(case, name: str) -> list[list[float]]:
    """Phi of the critics and baselines, in loops over steps."""
    batch, x, gamma = case.batch, case.x, 0.9
    kind, _, critic = name.partition(":")
    values = x.learned if critic else x.values
    following = x.next_learned if critic else x.next_values
    returns = loop_returns(case)
    found = []
    for n, row in enumerate(returns):
        v, z = values[n].tolist(), following[n].tolist()
        r, end = batch.rewards[n].tolist(), batch.terminated[n].tolist()
        length = len(row)
        delta = [r[t] + gamma * (0 if end[t] else z[t]) - v[t] for t in range(length)]
        if kind == "vanilla":
            phi = [row[0]] * length
        elif kind == "reinforce":
            phi = row
        elif kind == "trajectory_mean":
            phi = [g - sum(row) / length for g in row]
        elif kind == "batch_time_mean":
            own = [other for k, other in enumerate(returns) if k // 12 == n // 12]
            phi = []
            for t, g in enumerate(row):
                on = [other[t] for other in own if len(other) > t]
                phi.append(g - sum(on) / len(on))
        elif kind == "value":
            phi = [g - v[t] for t, g in enumerate(row)]
        elif kind == "actor_critic":
            phi = delta
        elif kind == "nstep":
            phi = []
            for t in range(length):
                last = min(t + case.args.n_steps, length) - 1
                a = sum(gamma ** (u - t) * r[u] for u in range(t, last + 1))
                phi.append(a + gamma ** (last - t + 1) * (0 if end[last] else z[last]) - v[t])
        elif kind == "gae":
            weight = gamma * case.args.lam
            phi = [
                sum(weight ** (u - t) * delta[u] for u in range(t, length)) for t in range(length)
            ]
        found.append(phi)
    return found


@pytest.mark.parametrize("name", [*po.PLAIN, *po.CRITICS])
def test_phi_and_gradient_in_loops(few, name):
    phi = loop_phi(few, name)
    ours = po.compute_phi(name, few.x, few.args)
    for n, row in enumerate(phi):
        assert ours[n, : len(row)].tolist() == pytest.approx(row, rel=SINGLE, abs=SINGLE)
    expected = weigh(few, [[w / 12 for w in row] for row in phi])
    close(few.gradients(name), expected, SINGLE)
    assert expected.norm() > 0.01


def group_weights(case, name: str) -> list[float]:
    """A_i of every episode, in loops over groups of 4, batches of 12."""
    scores = [row[0] for row in loop_returns(case)]
    found = []
    for n, score in enumerate(scores):
        first = n - n % 4
        group = scores[first : first + 4]
        mean = sum(group) / 4
        if max(group) == min(group):
            found.append(0.0)
        elif name == "rloo":
            found.append(score - (sum(group) - score) / 3)
        elif name == "grpo:group":
            std = (sum((s - mean) ** 2 for s in group) / 3) ** 0.5
            found.append((score - mean) / (std + 1e-4))
        elif name == "grpo:batch":
            whole = scores[n - n % 12 : n - n % 12 + 12]
            centre = sum(whole) / 12
            std = (sum((s - centre) ** 2 for s in whole) / 11) ** 0.5
            found.append((score - mean) / (std + 1e-4))
        else:
            found.append(score - mean)
    return found


@pytest.mark.parametrize("name", [*po.GROUPS, *po.LOSSES])
def test_groups_and_loss_types_in_loops(few, name):
    kind = name.partition(":")[2] if name in po.LOSSES else ""
    advantages = group_weights(few, "grpo:none" if kind else name)
    lengths = few.batch.mask.sum(dim=1).tolist()
    weights = []
    for n, a in enumerate(advantages):
        steps = sum(lengths[n - n % 12 : n - n % 12 + 12])
        share = {"bnpo": 1 / steps, "grpo": 1 / lengths[n] / 12, "dr_grpo": 1 / 12 / 9}
        weights.append([a * share.get(kind, 1 / 12)] * lengths[n])
    close(few.gradients(name), weigh(few, weights), SINGLE)
    assert any(a > 0 for a in advantages) and len(set(lengths)) > 3


@pytest.mark.parametrize("name", po.PAIRWISE)
def test_pairwise_in_loops(few, name):
    """At the sampling policy every pair pulls with dR, or with 2 sigma(dR) - 1."""
    scores = [row[0] for row in loop_returns(few)]
    weights = []
    for n, row in enumerate(loop_returns(few)):
        first, pull = n - n % 4, 0.0
        for other in scores[first : first + 4]:
            d = scores[n] - other
            pull += d if "linear" in name else 2 / (1 + math.exp(-d)) - 1
        share = 1 / len(row) if name.endswith("_mean") else 1.0
        weights.append([share * pull / 3 / 12] * len(row))  # 4 * 3 ordered pairs; 3 groups
    close(few.gradients(name), weigh(few, weights), SINGLE)


@pytest.mark.parametrize("name", po.KL)
def test_kl_terms_in_loops(few, name):
    kind, _, where = name.partition(":")
    logp, ref = few.x.logp_old.tolist(), few.x.log_ref.tolist()
    weights = []
    for n, row in enumerate(loop_returns(few)):
        w = []
        for t in range(len(row)):
            d = logp[n][t] - ref[n][t]
            if where == "loss":  # derivative of k in log pi
                w.append({"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[kind])
            else:
                w.append({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[kind])
        if where == "reward":
            w = [sum(w[t:]) for t in range(len(w))]
        weights.append([v / 12 for v in w])
    close(few.gradients(name), weigh(few, weights), 1e-12)


def test_gae_ends_at_the_td_error_and_at_monte_carlo(few, discounted):
    for case in (few, discounted):
        gamma = case.args.gamma

        def phi(name, case=case, **flags):
            x, args = case.x, argparse.Namespace(**vars(case.args) | flags)
            return po.compute_phi(name, x, args)[case.batch.mask]

        mc = phi("reinforce")
        td = po.compute_td(*po.td_inputs(case.x, False), gamma)[case.batch.mask]
        close(phi("gae", lam=1.0), mc - case.x.values[case.batch.mask], 1e-12)
        close(phi("gae", lam=0.0), td, 1e-14)
        close(phi("actor_critic"), td, 1e-14)
        close(phi("nstep", n_steps=1), td, 1e-14)
        for n in (case.batch.mask.shape[1], 10**6):
            close(phi("nstep", n_steps=n), mc - case.x.values[case.batch.mask], SINGLE)
        assert (phi("gae") - td).abs().max() > 0.01
        assert torch.equal(phi("ppo"), phi("gae"))


def test_ppo_steps_by_hand(few):
    """Clipped steps on one batch; with one step it is gae's gradient."""
    once = argparse.Namespace(**vars(few.args) | {"update_epochs": 1})
    close(po.gradients("ppo", few.x, few.logits, once), few.gradients("gae"), 1e-13)
    args = argparse.Namespace(**vars(few.args) | {"inner_rate": 6.0, "update_epochs": 3})
    ours = po.gradients("ppo", few.x, few.logits, args)
    phi, batch = loop_phi(few, "gae"), few.batch
    bound = 0
    for m in (0, 5, 11):
        theta = few.logits.clone()
        for _ in range(3):
            step, probs = torch.zeros_like(theta), theta.softmax(dim=1)
            for n in range(12 * m, 12 * m + 12):
                for t, a in enumerate(phi[n]):
                    s, action = batch.cells[n, t], batch.actions[n, t]
                    ratio = (probs[s, action] / few.probs[s, action]).item()
                    if (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8):
                        bound += 1
                        continue
                    step[s] -= a * ratio / 12 * probs[s]
                    step[s, action] += a * ratio / 12
            theta += 6.0 * step
        close(ours[m], ((theta - few.logits) / 18.0).flatten(), 1e-12)
    assert bound > 5


def test_gradients_leave_their_inputs_alone(few):
    before = few.logits.clone(), few.x.logp_old.clone()
    for name in ("ppo", "rloo", "pairwise:linear"):
        po.gradients(name, few.x, few.logits, few.args)
    assert torch.equal(before[0], few.logits) and torch.equal(before[1], few.x.logp_old)
    assert not few.logits.requires_grad


# ---- 5  known answers within three standard errors -----------------------------------------------

UNBIASED = ["vanilla", "reinforce", "value", "value:learned", "actor_critic", "nstep", "gae"]
UNBIASED += ["rloo", "pairwise:linear"]
SHRUNK = {"grpo:none": 7 / 8, "loss_type:dr_grpo": 7 / 8 / 100}
SHRUNK |= {"pairwise:logistic": 2 * (1 / (1 + math.exp(-1)) - 0.5)}


def within(row: dict, key: str, value: float) -> bool:
    return abs(row[key] - value) < 3 * row[f"{key}_se"]


def straight(row: dict) -> bool:
    return row["off"] - 3 * row["off_se"] < 0


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("where", ["start", "half"])
def test_unbiased_estimators(name, where, request):
    case = request.getfixturevalue(where)
    row = case.row(name)
    assert within(row, "scale", 1.0) and row["scale_se"] < 0.2, row
    assert straight(row), row
    assert case.chi_square(name, case.truth) > 1e-3


@pytest.mark.parametrize("name,scale", SHRUNK.items())
@pytest.mark.parametrize("where", ["start", "half"])
def test_shrunk_estimators_keep_the_direction(name, scale, where, request):
    case = request.getfixturevalue(where)
    row = case.row(name)
    assert within(row, "scale", scale) and row["scale_se"] < 0.2 * scale, row
    assert straight(row)
    assert case.chi_square(name, scale * case.truth) > 1e-3


@pytest.mark.parametrize("size", [2, 4, 16])
def test_group_mean_for_several_sizes(half, size):
    args = argparse.Namespace(**vars(half.args) | {"num_groups": 64 // size, "group_size": size})
    x = dataclasses.replace(half.x, shape=(half.x.num * 64 // size, size))
    for name, scale in (("grpo:none", (size - 1) / size), ("rloo", 1.0)):
        row = po.describe(po.gradients(name, x, half.logits, args), half.truth)
        assert within(row, "scale", scale) and row["scale_se"] < 0.05 and straight(row), row
    j = po.exact_return(half.lake, half.probs, 1.0, 100).item()
    flat = po.flat_groups(x.scores(1.0)).double()
    share = (1 - j) ** size + j**size
    assert abs(flat.mean().item() - share) < 3 * (share * (1 - share) / len(flat)) ** 0.5


def test_group_std_changes_the_length_only(start, half):
    for case in (start, half):
        row = case.row("grpo:group")
        assert straight(row) and row["scale"] > 1.3, row
    assert start.row("grpo:group")["scale"] > 1.5


def test_length_normalisation_turns_the_direction(start):
    row = start.row("loss_type:grpo")
    assert row["off"] > 0.2 and row["off"] > 3 * row["off_se"], row


def test_discounted_estimators(discounted):
    """Below gamma 1 reward-to-go estimates a sum without gamma^t; whole returns do not."""
    case, gamma = discounted, 0.9
    v, q = po.exact_values(case.lake, case.probs, gamma, 30)
    to_go = advantage_sum(case.lake, case.probs, q, v).flatten()
    for name in ("vanilla", "rloo", "pairwise:linear"):
        assert case.chi_square(name, case.truth) > 1e-3, name
        assert within(case.row(name), "scale", 1.0) and straight(case.row(name))
    assert case.chi_square("grpo:none", 7 / 8 * case.truth) > 1e-3
    for name in ("reinforce", "value", "value:learned", "actor_critic", "nstep", "gae"):
        assert case.chi_square(name, to_go) > 1e-3, name
        assert case.chi_square(name, case.truth) < 1e-6
    assert case.chi_square("trajectory_mean", to_go) < 1e-6
    assert not case.gradients("trajectory_mean").isnan().any()


def test_trajectory_mean_is_nothing_at_gamma_1(start):
    assert not start.gradients("trajectory_mean").any()
    row = start.row("trajectory_mean")
    assert row["scale"] == row["noise"] == row["cosine"] == 0


def test_learned_critics_trade_bias_for_noise(half, poor):
    """A critic of four episodes does not know most cells; one of 64 is as good as unbiased."""
    row = poor.row("actor_critic:learned")
    assert row["off"] > 0.1 and row["off"] > 4 * row["off_se"], row
    assert poor.chi_square("actor_critic:learned", poor.truth) < 1e-6
    for name in ("reinforce", "value:learned"):
        assert poor.chi_square(name, poor.truth) > 1e-3
    order = ["reinforce", "value:learned", "gae:learned", "nstep:learned", "actor_critic:learned"]
    noises = [half.row(name)["noise"] for name in order]
    assert noises == sorted(noises, reverse=True) and noises[-1] < 0.6 * noises[0]
    for name in ("gae", "nstep", "actor_critic"):  # the exact V is the better one
        row, learned = half.row(name), half.row(f"{name}:learned")
        assert row["noise"] < learned["noise"]
    assert poor.row("actor_critic:learned")["noise"] < poor.row("reinforce")["noise"] - 1


def test_more_steps_shrink_ppo(half):
    one, many = half.row("gae"), half.row("ppo")
    assert many["scale"] < one["scale"] - 3 * many["scale_se"], (one, many)


@pytest.mark.parametrize("where", ["start", "half"])
def test_kl_terms(where, request):
    case = request.getfixturevalue(where)
    ref = po.reference(16)
    d = po.visits(case.lake, case.probs, 100).sum(dim=0)
    leaf = case.logits.clone().requires_grad_()
    log_probs = leaf.log_softmax(dim=1)
    backward = (d * (log_probs.exp() * (log_probs - ref)).sum(dim=1)).sum()
    forward = (d * (ref.exp() * (ref - log_probs)).sum(dim=1)).sum()
    (of_backward,) = torch.autograd.grad(backward, leaf, retain_graph=True)
    (of_forward,) = torch.autograd.grad(forward, leaf)
    assert case.chi_square("k1:loss", torch.zeros_like(case.of_kl)) > 1e-3
    assert within(case.row("k1:loss"), "scale", 0.0)
    assert case.chi_square("k2:loss", of_backward.flatten()) > 1e-3
    assert case.chi_square("k3:loss", of_forward.flatten()) > 1e-3
    row = case.row("k1:reward")
    assert within(row, "scale", 1.0) and straight(row) and row["scale_se"] < 0.1
    assert case.chi_square("k1:reward", case.of_kl) > 1e-3
    assert case.chi_square("k2:loss", case.of_kl) < 1e-6
    row = case.row("k3:reward")
    assert row["off"] > 4 * row["off_se"] or not within(row, "scale", 1.0)


# ---- 6  statistics -------------------------------------------------------------------------------


def slow_measures(samples: torch.Tensor, truth: torch.Tensor) -> list[float]:
    """Scale, off2, noise, cosine from all pairs of different samples."""
    number, unit = len(samples), truth / truth.norm()
    signal = along = 0.0
    for i in range(number):
        others = torch.cat([samples[:i], samples[i + 1 :]])
        signal += (others @ samples[i]).sum().item()
        along += ((others @ unit) * (samples[i] @ unit)).sum().item()
    signal, along = (x / number / (number - 1) for x in (signal, along))
    square = sum((g @ g).item() for g in samples) / number
    raw, signal = signal, max(signal, 1e-12 * square)
    return [
        (samples.mean(dim=0) @ truth / truth.norm() ** 2).item(),
        (raw - along) / signal,
        (max(square - signal, 0.0) / signal) ** 0.5,
        sum((g @ unit / g.norm()).item() for g in samples) / number,
    ]


KEYS = ("scale", "off2", "noise", "cosine")
SHOWN = ("scale", "off", "noise", "cosine")


@pytest.mark.parametrize("number,dim", [(200, 8), (73, 5), (20, 3)])
def test_description_against_loops(number, dim):
    """Every number and its jackknife, also where blocks are uneven or fewer than fifty."""
    generator = torch.Generator().manual_seed(number)
    samples = torch.randn(number, dim, generator=generator, dtype=F64) + 0.7
    truth = torch.randn(dim, generator=generator, dtype=F64) + 1.0
    row = po.describe(samples, truth)
    assert list(row) == [*KEYS, *(f"{key}_se" for key in KEYS), "off", "off_se"]
    assert row["off"] == max(row["off2"], 0.0) ** 0.5
    smallest = max(row["off"], row["off2_se"] ** 0.5)
    assert row["off_se"] == pytest.approx(row["off2_se"] / 2 / smallest)
    assert [row[key] for key in KEYS] == pytest.approx(slow_measures(samples, truth), rel=1e-10)
    blocks = samples.tensor_split(min(50, number // 2))
    left = [
        slow_measures(torch.cat([*blocks[:k], *blocks[k + 1 :]]), truth) for k in range(len(blocks))
    ]
    for k, key in enumerate(KEYS):
        column = [values[k] for values in left]
        mean = sum(column) / len(column)
        error = sum((v - mean) ** 2 for v in column) * (len(column) - 1) / len(column)
        assert row[f"{key}_se"] == pytest.approx(error**0.5, rel=1e-8), key


def test_description_of_short_series():
    """A square of a mean, free of noise, may come out below 0; the share off has its sign."""
    signs, truth = set(), torch.tensor([1.0, 0.5, 0.0], dtype=F64)
    for seed in range(12):
        torch.manual_seed(seed)
        samples = 0.3 * truth + torch.randn(10, 3, dtype=F64)
        row, expected = po.describe(samples, truth), slow_measures(samples, truth)
        assert [row[key] for key in KEYS] == pytest.approx(expected, rel=1e-8)
        signs.add((row["off2"] > 0) - (row["off2"] < 0) if row["noise"] < 1e5 else 2)
    assert signs == {-1, 1, 2}


@pytest.mark.parametrize("correlated", [False, True])
def test_description_of_known_gaussians(correlated):
    """Scatter over 200 repetitions: centred on the known values, errors right within 25 %."""
    torch.manual_seed(4)
    dim, number, repeats = 6, 400, 200
    mean = torch.tensor([1.0, 0.5, 0.0, -0.3, 0.2, 0.0], dtype=F64)
    truth = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=F64)
    root = torch.randn(dim, dim, dtype=F64) * 0.5 if correlated else torch.eye(dim, dtype=F64)
    rows = []
    for _ in range(repeats):
        samples = mean + torch.randn(number, dim, dtype=F64) @ root.T
        rows.append(po.describe(samples, truth))
    size = mean.norm().item()
    known = {
        "scale": 0.5,
        "off2": (size**2 - 1.0) / size**2,
        "noise": (root @ root.T).trace().item() ** 0.5 / size,
    }
    many = mean + torch.randn(400_000, dim, dtype=F64) @ root.T
    known["cosine"] = (many[:, 0] / many.norm(dim=1)).mean().item()
    for key in KEYS:
        column = torch.tensor([row[key] for row in rows])
        error = torch.tensor([row[f"{key}_se"] for row in rows])
        scatter = column.std().item()
        assert abs(column.mean().item() - known[key]) < 0.25 * scatter, key
        assert abs(error.mean().item() / scatter - 1) < 0.25, (key, error.mean(), scatter)


def test_description_without_noise_and_without_mean():
    truth = torch.tensor([3.0, 4.0, 0.0], dtype=F64)
    row = po.describe((0.5 * truth).expand(60, -1), truth)
    assert row["scale"] == pytest.approx(0.5) and row["cosine"] == pytest.approx(1.0)
    assert abs(row["off"]) < 1e-6 and row["noise"] < 1e-6 and row["scale_se"] < 1e-12
    row = po.describe(torch.tensor([-4.0, 3.0, 0.0], dtype=F64).expand(60, -1), truth)
    assert row["off"] == pytest.approx(1.0) and row["cosine"] == pytest.approx(0.0, abs=1e-12)
    row = po.describe(torch.zeros(60, 3, dtype=F64), truth)
    assert row["scale"] == row["noise"] == row["cosine"] == 0 and math.isfinite(row["off_se"])
    torch.manual_seed(2)
    noise = torch.randn(30, 3, dtype=F64)
    row = po.describe(torch.cat([noise, -noise]), truth)
    assert row["scale"] == pytest.approx(0, abs=1e-12)
    row = po.describe(-truth + 0.1 * noise, truth)
    assert row["scale"] < -0.9 and row["cosine"] < -0.9 and abs(row["off"]) < 0.1


# ---- 7  metric, measure, run ---------------------------------------------------------------------


def test_metric_gives_lengths_and_angles_in_the_parameters():
    args = make_args("--policy", "cnn")
    lake, policy, inputs = po.make_policy(args)
    root, logits = po.metric(policy, inputs), policy(inputs)
    weights, torch_rows = list(policy.parameters()), []
    upstream = random_logits(16 * 3, 6).view(3, 64)
    for u in upstream:
        parts = torch.autograd.grad(logits, weights, u.view_as(logits), retain_graph=True)
        torch_rows.append(torch.cat([part.flatten() for part in parts]))
    theirs = torch.stack(torch_rows)
    ours = upstream @ root
    close(ours @ ours.T, theirs @ theirs.T, 1e-9)
    close(root, root.T, 1e-9)
    table = po.Table(5)
    assert torch.equal(po.metric(table, inputs), torch.eye(20, dtype=F64))
    # gradient of J itself
    j = po.exact_return(lake, logits.softmax(dim=1), 1.0, 100)
    parts = torch.autograd.grad(j, weights)
    length = sum(p.square().sum() for p in parts).sqrt().item()
    truth = po.true_gradients(lake, logits, args)[0]
    assert (truth @ root).norm().item() == pytest.approx(length, rel=1e-6)


class Bar:
    def __init__(self):
        self.seen = []

    def update(self, number):
        self.seen.append(number)


@pytest.mark.parametrize("policy", ["tabular", "cnn"])
def test_measure_describes_every_batch(policy, monkeypatch):
    """Equal chunks from one generator; the KL terms against the KL's gradient; the metric."""
    names = ["reinforce", "rloo", "k1:reward"]
    flags = ["--estimators", *names, "--batches", "120", "--gamma", "0.9", "--seed", "5"]
    flags += ["--num_groups", "2", "--group_size", "3", "--max_episode_steps", "20"]
    flags += ["--map", "SGFF/GFHF/FFFF/FFFH"]  # many groups win as one
    args = make_args("--policy", policy, *flags)
    lake, net, inputs = po.make_policy(args)
    if policy == "tabular":
        with torch.no_grad():
            net.theta.copy_(random_logits(16, 2, 0.5))
    real, seen = po.describe, []
    monkeypatch.setattr(po, "describe", lambda g, t: seen.append((g, t)) or real(g, t))
    bar = Bar()
    found = po.measure(lake, net, inputs, args, bar)
    assert bar.seen == [40, 40, 40] and list(found["estimators"]) == names
    logits = net(inputs).detach()
    log_probs, root = logits.log_softmax(dim=1), po.metric(net, inputs)
    of_return, of_kl = po.true_gradients(lake, logits, args)
    generator, parts, flat = torch.Generator().manual_seed(5), {n: [] for n in names}, []
    for num in (40, 40, 40):
        batch = po.sample_batch(lake, log_probs.exp(), num * 6, 20, generator)
        x = po.prepare(lake, batch, log_probs, args)
        flat.append(po.flat_groups(x.scores(0.9)).double())
        for name in names:
            parts[name].append(po.gradients(name, x, logits, args) @ root)
    for name, (g, truth) in zip(names, seen, strict=True):
        assert torch.equal(g, torch.cat(parts[name])) and len(g) == 120
        assert torch.equal(truth, (of_kl if name == "k1:reward" else of_return) @ root)
        assert json.dumps(found["estimators"][name]) == json.dumps(real(g, truth))
    share = torch.cat(flat)
    assert (share[-80:].bool() & (x.scores(0.9) > 0).all(dim=1)).any()
    assert len(share) == 240 and found["flat"] == pytest.approx(share.mean().item())
    p = found["flat"]
    assert found["flat_se"] == pytest.approx((p * (1 - p) / 239) ** 0.5)
    j = po.exact_return(lake, log_probs.exp(), 0.9, 20).item()
    assert found["return"] == j
    assert found["gradient_norm"] == pytest.approx((of_return @ root).norm().item())


def test_flat_groups_are_as_many_as_expected(start):
    j = po.exact_return(start.lake, start.probs, 1.0, 100).item()
    flat = po.flat_groups(start.x.scores(1.0)).double()
    error = (flat.std() / len(flat) ** 0.5).item()
    assert abs(flat.mean().item() - (1 - j) ** 8 - j**8) < 3 * error


def test_no_critic_is_learned_from_its_own_batch(monkeypatch):
    args = make_args("--batches", "51", "--estimators", "value:learned", "--points", "start")
    lake, policy, inputs = po.make_policy(args)
    real, seen = po.sample_batch, []

    def sample_batch(*given):
        seen.append(given[2] // 64)
        return real(*given)

    monkeypatch.setattr(po, "sample_batch", sample_batch)
    po.measure(lake, policy, inputs, args, Bar())
    assert sum(seen) == 51 and min(seen) > 1


# ---- 8  command line -----------------------------------------------------------------------------

SHORT = ["--batches", "4", "--num_groups", "2", "--group_size", "2", "--max_episode_steps", "30"]


def strict(text: str):
    """JSON without NaN or Infinity."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of all estimators at all points: folder, stdout, stderr."""
    import contextlib
    import io

    folder, out, err = tmp_path_factory.mktemp("runs"), io.StringIO(), io.StringIO()
    flags = ["--batches", "30", "--max_episode_steps", "40", "--output_dir", str(folder)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert po.main(flags) == 0
    return folder, out.getvalue(), err.getvalue()


def test_files_of_a_run(finished):
    folder, _, _ = finished
    (run,) = (folder / "policy_gradient_oracle").iterdir()
    assert run.name == "tabular-4x4-seed42"
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["run_dir"] == str(run) and list(results["points"]) == list(po.POINTS)
    lake = po.build_lake(tuple(po.MAPS["4x4"]), True)
    best = po.optimal_values(lake, 1.0, 40)[0][lake.start].item()
    assert results["best"] == best
    config = strict((run / "config.json").read_text(encoding="utf-8"))
    assert config["estimators"] == po.ESTIMATORS and config["torch"] == torch.__version__
    rows = [json.loads(s) for s in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 3 * len(po.ESTIMATORS)
    for row in rows:
        point, name = row.pop("point"), row.pop("estimator")
        assert row.pop("step") == list(po.POINTS).index(point)
        assert json.dumps(row) == json.dumps(results["points"][point]["estimators"][name])
    for point, share in po.POINTS.items():
        found = results["points"][point]
        assert list(found["estimators"]) == po.ESTIMATORS
        assert share * best <= found["return"] < share * best + 0.05
        assert found["gradient_norm"] > 1e-3 and 0 <= found["flat"] <= 1


def test_tensorboard_of_a_run(finished):
    (run,) = (finished[0] / "policy_gradient_oracle").iterdir()
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    events = events_of(run, images=0, tensors=0)
    tags = {f"{key}/{name}" for key in (*KEYS, "off") for name in po.ESTIMATORS}
    assert set(events.Tags()["scalars"]) == tags
    for name in ("reinforce", "k3:reward"):
        for key in KEYS:
            expected = [p["estimators"][name][key] for p in results["points"].values()]
            found = events.Scalars(f"{key}/{name}")
            assert [e.step for e in found] == [0, 1, 2]
            assert [e.value for e in found] == pytest.approx(expected, rel=1e-6)
    assert events.Tags()["tensors"] == ["table/text_summary"]
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("table/text_summary")]
    for text, (point, found) in zip(texts, results["points"].items(), strict=True):
        assert text == po.markdown(point, found, results["best"], 30)
    pytest.importorskip("matplotlib")
    images = {"flat_groups", *(f"bias_and_noise/{point}" for point in po.POINTS)}
    assert set(events.Tags()["images"]) == images


def test_tables_on_stdout(finished):
    """Every cell is the number of results.json, or a dash where the mean is lost in noise."""
    folder, out, err = finished
    (run,) = (folder / "policy_gradient_oracle").iterdir()
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    tables = out.split("\n\n")
    assert not err  # no bar in a pipe
    lines, point, dashes = out.splitlines(), None, 0
    for line in lines:
        if head := re.match(r"(\w+): J ([\d.]+) of ([\d.]+), flat groups ([\d.]+)%$", line):
            point = head[1]
            found = results["points"][point]
            values = found["return"], results["best"], 100 * found["flat"]
            for text, value in zip(head.groups()[1:], values, strict=True):
                assert abs(float(text) - value) <= 0.05001 if value > 1 else 1e-4
        elif line.startswith("| ") and "---" not in line and "estimator" not in line:
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            row = results["points"][point]["estimators"][name]
            lost = not 0 < row["noise"] < 0.5 * 30**0.5
            for key, digits, cell in zip(SHOWN, (3, 2, 2, 3), cells, strict=True):
                if key == "off" and not lost and row["off2"] < 2 * row["off2_se"]:
                    bound = (max(row["off2"], 0) + 2 * row["off2_se"]) ** 0.5
                    assert cell == f"< {bound:.2f}"
                elif lost and key in ("off", "noise"):
                    assert cell == "-"
                    dashes += 1
                else:
                    assert cell == f"{row[key]:.{digits}f} ± {row[key + '_se']:.{digits}f}"
    assert dashes > 2 and len(tables) > 6
    assert sum(line.startswith("| ") for line in lines) == 3 * (len(po.ESTIMATORS) + 2)
    assert re.match(r"30 batches, 5,760 episodes in all, \d+ s$", lines[-2])
    assert lines[-1] == f"logs: {run}    watch: tensorboard --logdir {folder}"


def test_lost_directions_have_a_dash():
    row = {k: 0.25 for key in SHOWN for k in (key, f"{key}_se")} | {"off2": 0.25, "off2_se": 0.1}
    found = {"return": 0.5, "flat": 0.125, "estimators": {}}
    noises = {"a": 0.0, "b": 4.9, "c": 5.1, "d": 1e140}
    found["estimators"] = {name: row | {"noise": noise} for name, noise in noises.items()}
    lines = po.markdown("half", found, 0.75, 100).splitlines()
    assert lines[0] == "half: J 0.5000 of 0.7500, flat groups 12.5%"
    cells = {c[1].strip(): [x.strip() for x in c[2:6]] for c in (s.split("|") for s in lines[4:])}
    assert cells["b"] == ["0.250 ± 0.250", "0.25 ± 0.25", "4.90 ± 0.25", "0.250 ± 0.250"]
    for name in "acd":
        assert cells[name] == ["0.250 ± 0.250", "-", "-", "0.250 ± 0.250"]


def test_figures_show_the_numbers():
    pytest.importorskip("matplotlib")
    args, figures = make_args("--group_size", "3"), {}

    class Writer:
        def add_figure(self, tag, figure):
            figures[tag] = figure

    row = {"off": 0.0, "noise": 3.0}
    rows = {"rloo": row | {"off": 0.4}, "vanilla": row, "k1:loss": row}
    points = {"start": {"return": 0.2, "success": 0.3, "flat": 0.37, "estimators": rows}}
    po.add_figures(Writer(), points, args)
    assert list(figures) == ["bias_and_noise/start", "flat_groups"]
    (axes,) = figures["bias_and_noise/start"].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[0.4, 3.0]], [[0.0, 3.0]]]
    assert [t.get_text() for t in axes.texts] == ["rloo", "vanilla"]
    curve, dots = figures["flat_groups"].axes[0].lines
    for j, share in curve.get_xydata():
        assert share == pytest.approx((1 - j) ** 3 + j**3, abs=1e-6)
    assert dots.get_xydata().tolist() == [[0.3, 0.37]]


def test_a_run_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    flags = [*SHORT, "--points", "half", "--estimators", "rloo", "--quiet"]
    assert po.main([*flags, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    run = tmp_path / "policy_gradient_oracle" / "a"
    json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert not events_of(run).Tags()["images"]


def numbers_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["points"]


def test_same_seed_same_numbers(tmp_path, capsys):
    flags = [*SHORT, "--points", "half", "start", "--estimators", "k1", "gae", "--quiet"]
    flags += ["--output_dir", str(tmp_path)]
    assert po.main(flags) == po.main(flags) == po.main([*flags, "--seed", "7"]) == 0
    assert capsys.readouterr() == ("", "")
    parent = tmp_path / "policy_gradient_oracle"
    names = [f"tabular-4x4-seed{end}" for end in ("42", "42-2", "7")]
    assert sorted(p.name for p in parent.iterdir()) == sorted(names)
    a, b, c = (numbers_of(parent / name) for name in names)
    assert a == b != c and list(a) == ["start", "half"]
    assert list(a["half"]["estimators"]) == ["k1:loss", "k1:reward", "gae", "gae:learned"]


def test_numbers_do_not_depend_on_the_other_estimators_or_points():
    """The same episodes for all: a subset gives the same rows."""
    args = make_args(*SHORT, "--estimators", "rloo", "ppo", "value")
    lake, policy, inputs = po.make_policy(args)
    many = po.measure(lake, policy, inputs, args, Bar())["estimators"]
    args.estimators = ["value:learned"]
    one = po.measure(lake, policy, inputs, args, Bar())["estimators"]
    assert many["value:learned"] == one["value:learned"]


@pytest.mark.parametrize(
    "given,expected",
    [
        (["gae"], ["gae", "gae:learned"]),
        (["gae:learned"], ["gae:learned"]),
        (["k1", "k1:loss"], ["k1:loss", "k1:reward"]),
        (["grpo", "loss_type:grpo"], ["grpo:group", "grpo:batch", "grpo:none", "loss_type:grpo"]),
        (["rloo", "ppo", "rloo"], ["rloo", "ppo"]),
        (["pairwise"], po.PAIRWISE),
        (["value"], ["value", "value:learned"]),
        (["loss_type"], po.LOSSES),
    ],
)
def test_names_of_estimators(given, expected):
    assert make_args("--estimators", *given).estimators == expected


def test_defaults(capsys):
    args = make_args()
    assert args.estimators == po.ESTIMATORS and args.estimators is not po.ESTIMATORS
    assert args.points == ["start", "half", "trained"] and args.frozen_lake_slippery
    assert (args.gamma, args.num_groups, args.group_size) == (1.0, 8, 8)
    assert args.map == "SFFF/FHFH/FFFH/HFFG" and args.max_episode_steps == 100
    before = list(po.ESTIMATORS)
    assert make_args("--policy", "cnn").estimators == [e for e in before if e != "ppo"]
    assert before == po.ESTIMATORS and "ppo" in before
    assert make_args("--points", "trained", "start").points == ["start", "trained"]
    with pytest.raises(SystemExit) as stop:
        po.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.count("(default") >= 20
    assert all(name in text for name in ("pairwise:logistic", "--max_episode_steps", "H, the step"))


@pytest.mark.parametrize(
    "text,rows,name",
    [
        ("8x8", "/".join(po.MAPS["8x8"]), "8x8"),
        ("sfff/fhfh/fffh/hffg", "SFFF/FHFH/FFFH/HFFG", "4x4"),
        ("SFFHF/FGFFF/FFFHG/HFFFF", "SFFHF/FGFFF/FFFHG/HFFFF", "4x5"),
        ("random", "/".join(po.generate_random_map(4, seed=3)), "random"),
    ],
)
def test_maps(text, rows, name):
    args = make_args("--map", text, "--seed", "3")
    assert args.map == rows and args.run_name == f"tabular-{name}-seed3"


def test_policies_start_where_the_seed_says():
    _, table, _ = po.make_policy(make_args("--seed", "1"))
    assert not table.theta.any() and table.theta.dtype == F64
    nets = [po.make_policy(make_args("--policy", "cnn", "--seed", s))[1] for s in "112"]
    a, b, c = ([p.detach() for p in net.parameters()] for net in nets)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0]) and a[0].dtype == F64
    for rows in ("SFFFFFFF/" + "FFFFFFFF/" * 2 + "FFFFFFFG", "SFFF/" + "FFFF/" * 7 + "FFFG"):
        _, net, inputs = po.make_policy(make_args("--policy", "cnn", "--map", rows))
        assert net(inputs).shape == (inputs[0, 0].numel(), 4)
    assert [tuple(p.shape) for p in a][::2] == [(32, 5, 3, 3), (32, 32, 3, 3), (128, 32), (4, 128)]


BAD = [
    (["--batches", "1"], "--batches"),
    (["--batches", "x"], "--batches"),
    (["--group_size", "1"], "--group_size"),
    (["--num_groups", "0"], "--num_groups"),
    (["--max_episode_steps", "0"], "--max_episode_steps"),
    (["--gamma", "1.1"], "--gamma"),
    (["--gamma", "nan"], "--gamma"),
    (["--lam", "-0.1"], "--lam"),
    (["--n_steps", "0"], "--n_steps"),
    (["--clip_epsilon", "-1"], "--clip_epsilon"),
    (["--update_epochs", "0"], "--update_epochs"),
    (["--inner_rate", "0"], "--inner_rate"),
    (["--seed", "-1"], "--seed"),
    (["--seed", str(2**31)], "--seed"),
    (["--threads", "-1"], "--threads"),
    (["--points", "end"], "--points"),
    (["--points"], "--points"),
    (["--policy", "mlp"], "--policy"),
    (["--show", "nothing"], "--show"),
    (["--estimators", "gaes"], "--estimators: gaes is none of vanilla"),
    (["--estimators", "rloo", "gae:"], "--estimators"),
    (["--estimators", ""], "--estimators"),
    (["--estimators"], "--estimators"),
    (["--policy", "cnn", "--estimators", "ppo"], "--estimators: ppo's inner steps need"),
    (["--map", "5x5"], "--map"),
    (["--map", "SFFX/FFFF/FFFF/FFFG"], "--map"),
    (["--map", "SFFF/FFF/FFFF/FFFG"], "make them equally long"),
    (["--map", "SFFF/FFFF/FFFF/FFFF"], "--map"),
    (["--map", "SFFS/FFFF/FFFF/FFFG"], "one S"),
    (["--map", "SFG/FFF/FFF/FFF", "--policy", "cnn"], "4x4 is the least"),
    (["--map", "SFGF/FFFF/FFFF", "--policy", "cnn"], "4x4 is the least"),
    (["--run_name", "a/b"], "--run_name"),
    (["--run_name", ".."], "--run_name"),
    (["--run_name", ""], "--run_name"),
    (["--no_such_flag"], "--no_such_flag"),
]


@pytest.mark.parametrize("flags,words", BAD)
def test_bad_input(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        po.main(flags)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and words in err.splitlines()[-1] and not out
    assert flags[0] in err.splitlines()[-1] or flags[0] == "--policy"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("at", ["sample_batch", "ascend"])
def test_ctrl_c(at, tmp_path, capsys, monkeypatch):
    real = getattr(po, at)

    def stopping(*given):
        signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(po, at, stopping)
    flags = [*SHORT, "--quiet", "--estimators", "rloo", "--output_dir", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        assert po.main(flags) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert err == "stopped\n" and not out
    (run,) = (tmp_path / "policy_gradient_oracle").iterdir()
    assert not (run / "results.json").exists()


def test_ctrl_c_in_show_values(capsys, monkeypatch):
    def ascend(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(po, "ascend", ascend)
    assert po.main(["--show", "values"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("inside", [False, True])
def test_output_that_cannot_be_written(inside, tmp_path, capsys):
    path = tmp_path / "policy_gradient_oracle" if inside else tmp_path / "file"
    path.write_text("")
    target = tmp_path if inside else path
    assert po.main([*SHORT, "--quiet", "--output_dir", str(target)]) == 1
    out, err = capsys.readouterr()
    assert re.match(r"error: .+\n$", err) and str(path) in err and not out


def test_run_of_a_cnn(tmp_path, capsys):
    flags = [*SHORT, "--policy", "cnn", "--points", "start", "--seed", "3", "--map", "random"]
    assert po.main([*flags, "--output_dir", str(tmp_path)]) == 0
    (run,) = (tmp_path / "policy_gradient_oracle").iterdir()
    assert run.name == "cnn-random-seed3"
    found = numbers_of(run)["start"]["estimators"]
    assert list(found) == [e for e in po.ESTIMATORS if e != "ppo"]
    assert "k3:reward" in capsys.readouterr().out


def test_run_sets_threads(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(po, "make_policy", lambda _: 1 / 0)
    for threads, expected in (("1", 1), ("0", torch.get_num_threads())):
        with pytest.raises(ZeroDivisionError):
            po.run(make_args("--threads", threads, "--output_dir", str(tmp_path)))
        assert seen.pop() == expected


# ---- 9  --show values ----------------------------------------------------------------------------


def blocks(text: str) -> dict[str, list[list[str]]]:
    """The titled blocks of --show values."""
    found = {}
    for block in text.strip("\n").split("\n\n"):
        title, *rows = block.splitlines()
        found.setdefault(title, [row.split() for row in rows])
    return found


@pytest.mark.parametrize("rows,gamma", [(tuple(po.MAPS["4x4"]), 0.9), (CUSTOM, 1.0)])
def test_show_values(rows, gamma, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--show", "values", "--gamma", str(gamma), "--map", "/".join(rows)]
    assert po.main([*flags, "--points", "start"]) == 0
    out = capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    residuals = [float(x) for x in re.findall(r"residual max .*: (\S+)", out)]
    assert len(residuals) == 2 and max(residuals) < 1e-10
    found, lake, tiles = blocks(out), po.build_lake(rows, True), "".join(rows)
    width = len(rows[0])
    uniform = torch.full((len(tiles), 4), 0.25, dtype=F64)
    v, q = po.policy_values(lake, uniform, gamma)
    best_v, best_q = po.optimal_values(lake, gamma)
    for title, values in (("V_pi of the policy 'start'", v), ("V*", best_v)):
        cells = [cell for row in found[title] for cell in row]
        assert [len(row) for row in found[title]] == [width] * len(rows)
        for cell, tile, value in zip(cells, tiles, values.tolist(), strict=True):
            assert cell == (f"{value:.4f}" if tile in "SF" else tile)
    names = {"Q_pi": q, "A_pi = Q_pi - V_pi": q - v[:, None], "Q*": best_q}
    for title, table in names.items():
        lines = found[f"{title}: row, column; left, down, right, up"]
        live = lake.live.nonzero().flatten().tolist()
        assert len(lines) == len(live)
        for s, line in zip(live, lines, strict=True):
            assert line[:2] == [f"{s // width},", f"{s % width}"]
            assert [float(x) for x in line[2:]] == pytest.approx(table[s].tolist(), abs=5.1e-5)
    arrows = [cell for row in found["the greedy policy of Q*"] for cell in row]
    for s, (arrow, tile) in enumerate(zip(arrows, tiles, strict=True)):
        if tile in "SF":
            assert best_q[s, "←↓→↑".index(arrow)] == best_q[s].max()
        else:
            assert arrow == tile


def greedy_return(text: str, lake: po.Lake) -> float:
    arrows = [cell for row in blocks(text)["the greedy policy of Q*"] for cell in row]
    actions = [max("←↓→↑".find(arrow), 0) for arrow in arrows]
    probs = F.one_hot(torch.tensor(actions), 4).to(F64)
    return po.exact_return(lake, probs, 1.0, 5000).item()


def test_arrows_lead_to_the_goal(capsys):
    flags = ["--show", "values", "--points", "start"]
    assert po.main(flags) == 0
    out = capsys.readouterr().out
    lake = po.build_lake(tuple(po.MAPS["4x4"]), True)
    assert greedy_return(out, lake) == pytest.approx(14 / 17, abs=1e-9)


def test_arrows_lead_to_the_goal_without_ice(capsys):
    flags = ["--show", "values", "--points", "start", "--no-frozen_lake_slippery"]
    assert po.main(flags) == 0
    lake = po.build_lake(tuple(po.MAPS["4x4"]), False)
    assert greedy_return(capsys.readouterr().out, lake) == pytest.approx(1.0)


def test_show_values_of_every_point(capsys):
    """One block a policy, better each time; a CNN too."""
    assert po.main(["--show", "values", "--max_episode_steps", "30", "--quiet"]) == 0
    out = capsys.readouterr().out
    first = re.findall(r"V_pi of the policy '(\w+)'\n  (\S+)", out)
    assert [name for name, _ in first] == list(po.POINTS)
    assert float(first[0][1]) < float(first[1][1]) < float(first[2][1])
    assert len(re.findall("residual max", out)) == 4
    assert po.main(["--show", "values", "--policy", "cnn", "--points", "start"]) == 0
    assert "A_pi" in capsys.readouterr().out


# ---- 10  what is not so yet ----------------------------------------------------------------------


def test_every_number_is_finite(finished):
    torch.manual_seed(2)
    noise = torch.randn(30, 3, dtype=F64)
    row = po.describe(torch.cat([noise, -noise]), torch.ones(3, dtype=F64))
    assert all(math.isfinite(value) for value in row.values())
    (run,) = (finished[0] / "policy_gradient_oracle").iterdir()
    strict((run / "results.json").read_text(encoding="utf-8"))


def test_few_batches_give_valid_json(tmp_path):
    flags = ["--batches", "4", "--points", "start", "--estimators", "rloo", "--quiet"]
    assert po.main([*flags, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    path = tmp_path / "policy_gradient_oracle" / "a" / "results.json"
    strict(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "flags,name",
    [
        (["--max_episode_steps", "4"], "max_episode_steps"),
        (["--gamma", "0"], "gamma"),
        (["--map", "SHFF/HFFF/FFFF/FFFG", "--no-frozen_lake_slippery"], "map"),
    ],
)
def test_no_reward_no_gradient(flags, name, tmp_path, capsys):
    assert po.main([*SHORT, *flags, "--quiet", "--output_dir", str(tmp_path)]) == 2
    assert f"argument --{name}: no reward" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["discounted_return", "compute_nstep"])
def test_discounting_in_double_precision(name):
    """A relative 1e-7: nothing beside the noise, but the reward is float64 here."""
    zero, off = torch.zeros(1, 6, dtype=F64), torch.zeros(1, 6, dtype=torch.bool)
    rewards = F.pad(torch.ones(1, 1, dtype=F64), (5, 0))
    if name == "discounted_return":
        found = po.discounted_return(rewards, 0.9)
    else:
        found = po.compute_nstep(rewards, zero, zero, off, off, 0.9, 9)[:, 0]
    assert found.item() == pytest.approx(0.9**5, rel=1e-12)


def test_flat_groups_go_by_the_undiscounted_return(tmp_path):
    """Below gamma 1 J is not the chance of a reward; the formula of flat groups needs that."""
    flags = ["--gamma", "0.9", "--batches", "4", "--points", "half", "--estimators", "rloo"]
    args = po.parse_args([*flags, "--quiet", "--output_dir", str(tmp_path)])
    found = po.run(args)["points"]["half"]
    lake, policy, inputs = po.make_policy(args)
    best = po.optimal_values(lake, 0.9, 100)[0][lake.start].item()
    po.ascend(policy, lake, inputs, args, 0.5 * best)
    probs = policy(inputs).detach().softmax(dim=1)
    assert found["success"] == pytest.approx(po.exact_return(lake, probs, 1.0, 100).item())
    assert found["return"] == pytest.approx(po.exact_return(lake, probs, 0.9, 100).item())
    assert found["success"] > 2 * found["return"]
